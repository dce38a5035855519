"""One save from its beginning to the end: a copy of the state if requested, its files, their commit."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate_nb.errors import CheckpointError
from accelerate_nb.rank import background_tasks
from accelerate_nb.runtime.checkpoints import manifest
from accelerate_nb.runtime.checkpoints.commit_protocol import (
    MainProcessCommit,
    OtherProcessCommit,
    SaveChannel,
    SingleProcessCommit,
    save_channel_of,
)
from accelerate_nb.runtime.checkpoints.io import atomic_commit
from accelerate_nb.runtime.checkpoints.io.atomic_commit import CheckpointPaths
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
    _channel: SaveChannel | None = field(init=False)

    def __post_init__(self) -> None:
        self._channel = None if self.world.size == 1 else save_channel_of(self.world)

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
        needs_all: bool,
        blocking: bool,
    ) -> None:
        """
        Save what `files` gives for a draft, and call `after` when it is committed; all processes call it.

        Without `needs_all` the main process goes on without those that don't. Without `blocking` it returns when the state has
        been copied.
        """
        agreement = self._agreement(paths.folder, needs_all)
        with named(paths.folder):
            if not agreement.begin(lambda: atomic_commit.clear(paths)):
                return
        try:
            with named(paths.folder):
                paths.draft.mkdir(parents=True, exist_ok=True)  # on a machine with a disk of its own
                wanted = files(paths.draft)
                if not blocking:
                    wanted = self._copied(wanted)
        except BaseException as error:
            with suppress(CheckpointError):  # the others receive the reason
                agreement.finish(f"{paths.folder} was not written: {error}", lambda: None)
            raise
        if blocking:
            self._write(agreement, paths, wanted, _THREADS)
            after()
            return

        def write() -> None:
            self._write(agreement, paths, wanted, 1)
            after()

        self.writing = BackgroundWrite(paths.folder, write)
        if self._channel is not None:
            self._channel.busy = self.writing.thread

    def _agreement(self, folder: Path, needs_all: bool) -> SingleProcessCommit:
        if self._channel is None:
            return SingleProcessCommit()
        if self._channel.busy is not None:
            self._channel.busy.join()  # another Accelerator's save
        if self.world.is_main:
            return MainProcessCommit(self._channel, folder, needs_all=needs_all)
        return OtherProcessCommit(self._channel, folder)

    def _copied(self, files: list[FileToWrite]) -> list[FileToWrite]:
        self._memory.give_back()
        copier = HostCopier(self._memory)
        copies = [replace(file, content=copier.copy(file.content)) for file in files]
        copier.finish()
        return copies

    def _write(
        self, agreement: SingleProcessCommit, paths: CheckpointPaths, files: list[FileToWrite], threads: int
    ) -> None:
        """Write this process's files; returns when the checkpoint is committed on all."""
        complaint: str | None = "It was interrupted."
        written: dict[str, manifest.ManifestEntry] = {}

        def commit() -> None:
            with named(paths.folder):
                for file in files:
                    if isinstance(file, LastFile):
                        written.update(file.write_last(paths.draft))
                for path in paths.draft.rglob("*"):
                    if path.is_dir() or path.name not in written:
                        atomic_commit.sync(
                            path
                        )  # what hooks have written; the other processes' files are there already
                manifest.write(paths.draft, written)
                atomic_commit.commit(paths)

        try:
            own = [file for file in files if not isinstance(file, LastFile)]
            written = write_files(own, paths.draft, threads=threads)
            complaint = None
        except CheckpointError as error:
            complaint = f"{error} What was there before is unchanged."
            raise
        finally:
            agreement.finish(complaint, commit)
        # there is still a draft: this machine's disk is its own. By now it may be that of the main process's next save
        is_first_of_another = self.world.is_local_main and not self.world.is_main
        if is_first_of_another and written and all((paths.draft / name).exists() for name in written):
            commit()


class BackgroundWrite:
    """
    One checkpoint on its way to the disk, written by a thread.

    A launched function has not finished before it, and a program that ends waits for it: the thread is not a daemon. A
    failure that was not raised by then is printed on stderr.
    """

    def __init__(self, folder: Path, work: Callable[[], None]) -> None:
        self.folder = folder
        self._work = work
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="accelerate_nb checkpoint writer", daemon=False)
        atexit.register(self._print_failure)
        background_tasks.begun(self.wait)
        self.thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is in its folder; a `CheckpointError` names the reason why it is not."""
        self.thread.join()
        atexit.unregister(self._print_failure)
        background_tasks.done(self.wait)
        if self._error is not None:
            raise CheckpointError(
                f"The checkpoint that was written in the background did not come about: {self._error} "
                "The former one is unchanged. Save again, or with blocking=True."
            ) from self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised in `wait`
            self._error = error

    def _print_failure(self) -> None:
        self.thread.join()
        if self._error is not None:
            sys.stderr.write(f"The checkpoint {self.folder} was not written: {self._error}\n")
