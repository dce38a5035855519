"""One save from its beginning to the end: a copy of the state if requested, its files, their commit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import manifest
from accelerate_nb.runtime.checkpoints.commit_protocol import CommitChannel, SingleProcessCommit, commit_channel_of
from accelerate_nb.runtime.checkpoints.io import atomic_commit
from accelerate_nb.runtime.checkpoints.io.atomic_commit import CheckpointPaths
from accelerate_nb.runtime.checkpoints.io.background_write import BackgroundWrite
from accelerate_nb.runtime.checkpoints.io.host_copy import HostCopier, HostMemory
from accelerate_nb.runtime.checkpoints.io.writer import FileToWrite, LastFile, named, write_files
from accelerate_nb.runtime.world.world import World

# Files are written at the same time because what takes time is the disk, and torch's sums over what it writes.
_THREADS = 4


@dataclass
class Saver:
    """The saves of one `Accelerator`; it knows the save that is still being written."""

    world: World
    writing: BackgroundWrite | None = None
    _memory: HostMemory = field(default_factory=HostMemory)
    _channel: CommitChannel | None = field(init=False)

    def __post_init__(self) -> None:
        # before the first save, so that a process that dies until then is missed
        self._channel = None if self.world.size == 1 else commit_channel_of(self.world)

    def wait(self) -> Path | None:
        """Wait for the save that is still being written; the folder that it went to."""
        writing, self.writing = self.writing, None
        if writing is None:
            return None
        writing.wait()
        return writing.folder

    def save(
        self,
        paths: CheckpointPaths,
        files: Callable[[Path], list[FileToWrite]],
        after: Callable[[], None],
        *,
        moment: str,
        blocking: bool,
    ) -> None:
        """
        Save what `files` gives for a draft, and call `after` when it is committed; all processes call it.

        Processes that save at the same `moment` of the training belong together. Without `blocking` it
        returns when the state has been copied.
        """
        agreement = SingleProcessCommit() if self._channel is None else self._channel.agreement(paths.folder, moment)
        item = _Save(self.world, paths, agreement)
        with named(paths.folder):
            agreement.begin(lambda: atomic_commit.clear(paths))
        try:
            with named(paths.folder):
                paths.draft.mkdir(parents=True, exist_ok=True)  # on a machine with a disk of its own
                wanted = files(paths.draft)
                if not blocking:
                    wanted = self._copied(wanted)
        except BaseException as error:
            item.give_up(str(error))
            raise
        if blocking:
            self._finish(item, wanted, after, _THREADS)
        else:
            self.writing = BackgroundWrite(paths.folder, lambda: self._finish(item, wanted, after, 1))

    def _finish(self, save: _Save, files: list[FileToWrite], after: Callable[[], None], threads: int) -> None:
        save.write(files, threads)
        after()

    def _copied(self, files: list[FileToWrite]) -> list[FileToWrite]:
        self._memory.give_back()
        copier = HostCopier(self._memory)
        copies = [replace(file, content=copier.copy(file.content)) for file in files]
        copier.finish()
        return copies


@dataclass(frozen=True, slots=True)
class _Save:
    """This process's part of one save."""

    world: World
    paths: CheckpointPaths
    agreement: SingleProcessCommit

    def write(self, files: list[FileToWrite], threads: int) -> None:
        """Write this process's files; returns when the checkpoint is committed on all."""
        complaint: str | None = "It was interrupted."
        written: dict[str, manifest.ManifestEntry] = {}
        last = [file for file in files if isinstance(file, LastFile)]
        try:
            own = [file for file in files if not isinstance(file, LastFile)]
            written = write_files(own, self.paths.draft, threads=threads)
            complaint = None
        except CheckpointError as error:
            complaint = f"{error} What was there before is unchanged."
            raise
        finally:
            self._finish(complaint, written, last)

    def give_up(self, reason: str) -> None:
        """This process has nothing to write; the others receive the reason."""
        try:
            self.agreement.finish(f"{self.paths.folder} was not written: {reason}", lambda: None)
        except CheckpointError:
            return  # it was raised where it happened

    def _finish(
        self, complaint: str | None, written: dict[str, manifest.ManifestEntry], last: Sequence[LastFile]
    ) -> None:
        def commit() -> None:
            with named(self.paths.folder):
                for file in last:
                    written.update(file.write_last(self.paths.draft))
                self._commit(written)

        self.agreement.finish(complaint, commit)
        if self.world.is_main or self.agreement.is_apart:
            return
        # by now there may be a draft of the main process's next save
        if written and all((self.paths.draft / name).exists() for name in written):
            self._come_after(written, commit)

    def _come_after(self, written: dict[str, manifest.ManifestEntry], commit: Callable[[], None]) -> None:
        """There is still a draft: this machine's disk is its own, or this process began when the others were done."""
        content = manifest.read(self.paths.folder)
        if content is not None and content["token"] == self.agreement.token:
            for name in written:
                (self.paths.draft / name).replace(self.paths.folder / name)
            shutil.rmtree(self.paths.draft.parent, ignore_errors=True)
        elif self.world.is_local_main:
            commit()

    def _commit(self, written: dict[str, manifest.ManifestEntry]) -> None:
        draft, absent = self.paths.draft, len(self.agreement.absent)
        for path in draft.rglob("*"):
            if path.is_dir() or path.name not in written:
                atomic_commit.sync(path)  # what hooks have written; the other processes' files are there already
        manifest.write(draft, written, self.agreement.token, 1 if self.agreement.is_apart else self.world.size - absent)
        atomic_commit.commit(self.paths)
