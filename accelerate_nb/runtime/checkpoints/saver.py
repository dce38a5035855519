"""One save from its beginning to the end: a copy of the state where it is wanted, its files, their place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import committing, manifest
from accelerate_nb.runtime.checkpoints.agreeing import Alone, Line, line_of
from accelerate_nb.runtime.checkpoints.background import Writing
from accelerate_nb.runtime.checkpoints.committing import Place
from accelerate_nb.runtime.checkpoints.hosting import Copier, HostMemory
from accelerate_nb.runtime.checkpoints.writing import File, named, write_files
from accelerate_nb.runtime.world import World

# Files are written at the same time because what takes time is the disk, and torch's sums over what it writes.
_THREADS = 4


@dataclass
class Saver:
    """What one `Accelerator` saves with; it knows the save that is still being written."""

    world: World
    writing: Writing | None = None
    _memory: HostMemory = field(default_factory=HostMemory)
    _line: Line | None = field(init=False)

    def __post_init__(self) -> None:
        # before the first save, so that a process that dies until then is missed
        self._line = None if self.world.size == 1 else line_of(self.world)

    def wait(self) -> Path | None:
        """Wait for the save that is still being written; the folder that it went to."""
        writing, self.writing = self.writing, None
        if writing is None:
            return None
        writing.wait()
        return writing.folder

    def save(
        self,
        place: Place,
        files: Callable[[Path], list[File]],
        after: Callable[[], None],
        *,
        moment: str,
        blocking: bool,
    ) -> None:
        """
        Save what `files` gives for a draft, and call `after` when it is in its place; all processes call it.

        `moment` is of the training: processes that save in the same one belong together. Without `blocking` it
        returns when the state has been copied.
        """
        agreed = Alone() if self._line is None else self._line.agreement(place.folder, moment)
        one = _Save(self.world, place, agreed)
        with named(place.folder):
            agreed.begin(lambda: committing.clear(place))
        try:
            with named(place.folder):
                place.draft.mkdir(parents=True, exist_ok=True)  # on a machine with a disk of its own
                wanted = files(place.draft)
                if not blocking:
                    wanted = self._copied(wanted)
        except BaseException as error:
            one.give_up(str(error))
            raise
        if blocking:
            self._finish(one, wanted, after, _THREADS)
        else:
            self.writing = Writing(place.folder, lambda: self._finish(one, wanted, after, 1))

    def _finish(self, one: _Save, files: list[File], after: Callable[[], None], threads: int) -> None:
        one.write(files, threads)
        after()

    def _copied(self, files: list[File]) -> list[File]:
        self._memory.give_back()
        copier = Copier(self._memory)
        copies = [File(file.name, copier.copy(file.content), file.safe) for file in files]
        copier.finish()
        return copies


@dataclass(frozen=True, slots=True)
class _Save:
    """This process's part of one save."""

    world: World
    place: Place
    agreed: Alone

    def write(self, files: list[File], threads: int) -> None:
        """Write this process's files; returns when the checkpoint is in its place on all."""
        complaint: str | None = "It was interrupted."
        written: dict[str, manifest.Entry] = {}
        try:
            written = write_files(files, self.place.draft, threads=threads)
            complaint = None
        except CheckpointError as error:
            complaint = f"{error} What was there before is unchanged."
            raise
        finally:
            self._finish(complaint, written)

    def give_up(self, reason: str) -> None:
        """This process has nothing to write; the others hear why."""
        try:
            self.agreed.finish(f"{self.place.folder} was not written: {reason}", lambda: None)
        except CheckpointError:
            return  # it was raised where it happened

    def _finish(self, complaint: str | None, written: dict[str, manifest.Entry]) -> None:
        def commit() -> None:
            with named(self.place.folder):
                self._put_in_place(written)

        self.agreed.finish(complaint, commit)
        if not (self.world.is_main or self.agreed.is_apart) and self._is_left(written):
            self._come_after(written, commit)

    def _is_left(self, written: dict[str, manifest.Entry]) -> bool:
        """Whether the draft still holds this process's files; by now there may be a draft of the main process's next save."""
        return bool(written) and all((self.place.draft / name).exists() for name in written)

    def _come_after(self, written: dict[str, manifest.Entry], commit: Callable[[], None]) -> None:
        """There is still a draft: this machine's disk is its own, or this process began when the others were done."""
        content = manifest.read(self.place.folder)
        if content is not None and content["token"] == self.agreed.token:
            for name in written:
                (self.place.draft / name).replace(self.place.folder / name)
            shutil.rmtree(self.place.draft.parent, ignore_errors=True)
        elif self.world.is_local_main:
            commit()

    def _put_in_place(self, written: dict[str, manifest.Entry]) -> None:
        draft, absent = self.place.draft, len(self.agreed.absent)
        for each in draft.rglob("*"):
            if each.is_dir() or each.name not in written:
                committing.sync(each)  # what hooks have written; the other processes' files are there already
        manifest.write(draft, written, self.agreed.token, 1 if self.agreed.is_apart else self.world.size - absent)
        committing.commit(self.place)
