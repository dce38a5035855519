"""How the processes of one save agree on what became of it, without a collective operation."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Set as AbstractSet
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from accelerate_nb.errors import CheckpointError
from accelerate_nb.notices import notice
from accelerate_nb.own import Own
from accelerate_nb.runtime.checkpoints import manifest
from accelerate_nb.runtime.checkpoints.presence import Presence
from accelerate_nb.runtime.world import World

# How long the others' files may take once they have begun to save.
LIMIT = timedelta(minutes=30)
# How long the main process waits for the others to begin, before it goes on without them.
GRACE = 20.0
# How long a process waits for the main one to come to its folder, once that has saved to another in the same step.
SETTLE = 5.0
# How often a process that waits for another one looks whether that is alive.
_LOOK = timedelta(seconds=1)
_FINE = "fine"
# What becomes of a process in a save of the main one: whoever says it first is right.
_JOINED, _ELSEWHERE, _LEFT_OUT = "joined", "elsewhere", "left out"


class Alone:
    """One process: what it says is what is so."""

    absent: AbstractSet[int] = frozenset()
    # whether this process has to bring a folder of its own to its place
    is_apart = False

    def __init__(self) -> None:
        self.token = os.urandom(8).hex()

    def begin(self, clear: Callable[[], None]) -> None:
        """Have the draft cleared before anybody writes to it."""
        clear()

    def finish(self, complaint: str | None, commit: Callable[[], None]) -> None:
        """
        Have the draft committed once every process has written its files; returns when that is done.

        `complaint` says why this process's files could not be written. A `CheckpointError` is raised on all if one complains.
        """
        if complaint is not None:
            raise CheckpointError(complaint)
        commit()


class Line:
    """What one process hears of the others about saves, through a connection that no collective operation uses."""

    def __init__(self, world: World) -> None:
        store: Any = world.store
        self.world = world
        self.store: Any = dist.PrefixStore("accelerate_nb/checkpoint", store.clone())
        self.presence = Presence(world, self.store)
        # processes that were not in the last save
        self.absent: set[int] = set()
        # the main process's saves that this one has had its part in, or has none in
        self.past: set[int] = set()
        self.settle = SETTLE
        # whatever was saved before is none of this process's business
        self._first = self.store.add("saves", 0) + 1

    def unsettled(self, newest: int) -> list[int]:
        """The main process's saves, up to the newest, of which it is open what this one has to do with them."""
        return [each for each in range(self._first, newest + 1) if each not in self.past]

    def agreement(self, folder: Path, moment: str) -> Alone:
        """What the processes agree with about one save; `moment` tells of the training's step."""
        return (Leading if self.world.is_main else Following)(self, folder, moment)


# by group: a process makes one connection for all of its Accelerators, and a new one after it has joined another group
_lines: Own[WeakKeyDictionary[Any, Line]] = Own(WeakKeyDictionary)


def line_of(world: World) -> Line:
    """The one connection of this process's group over which its saves are agreed on."""
    lines, group = _lines.get(), world.group
    if group not in lines:
        lines[group] = Line(world)
    return lines[group]


class Leading(Alone):
    """
    The main process among others: it says where it saves, waits until their files are written, and commits.

    Loops that call `save_state` on the main process alone, as Accelerate lets them, are not left waiting: who has not begun
    after a while is taken to be absent, unless it has died: then the checkpoint does not appear, as it could not be resumed.
    """

    def __init__(self, line: Line, folder: Path, moment: str) -> None:
        super().__init__()
        self.absent = set(line.absent)
        self._line, self._store = line, line.store
        self._opening = json.dumps({"folder": str(folder), "moment": moment, "token": self.token})
        self._number = 0
        self._opened = 0.0

    def begin(self, clear: Callable[[], None]) -> None:
        self._number = self._store.add("saves", 1)
        try:
            clear()
        except OSError as error:
            self._store.set(f"{self._number}/verdict", str(error))
            raise
        finally:
            self._opened = time.monotonic()
            self._store.set(f"{self._number}/open", self._opening)

    def finish(self, complaint: str | None, commit: Callable[[], None]) -> None:
        verdict = "The main process was interrupted."
        try:
            verdict = self._gathered(complaint)
            if verdict == _FINE:
                verdict = "The main process was interrupted."
                commit()
                verdict = _FINE
        except CheckpointError as error:
            verdict = str(error)
            raise
        finally:
            self._store.set(f"{self._number}/verdict", verdict)
        if verdict != _FINE:
            raise CheckpointError(complaint or f"The checkpoint was not written: another process failed. {verdict}")

    def _gathered(self, complaint: str | None) -> str:
        """The first complaint of all processes."""
        self.absent = self._not_here()
        others = [rank for rank in range(1, self._line.world.size) if rank not in self.absent]
        for rank in others:
            self._wait_for(rank)
        said = [complaint or _FINE, *(self._store.get(f"{self._number}/{rank}/done").decode() for rank in others)]
        return next((each for each in said if each != _FINE), _FINE)

    def _not_here(self) -> set[int]:
        """The processes that have not begun to save, some time after this one has, or that save elsewhere."""
        missing = set(range(1, self._line.world.size))
        elsewhere: set[int] = set()
        end = self._opened + GRACE
        while missing:
            here = {rank: self._place_of(rank) for rank in missing}
            elsewhere |= {rank for rank, place in here.items() if place == _ELSEWHERE}
            missing = {rank for rank, place in here.items() if place is None}
            if missing <= self._line.absent or time.monotonic() > end:
                break
            self._mourn(missing)
            time.sleep(0.02)
        self._mourn(missing)
        absent = {rank for rank in missing if self._say(rank, _LEFT_OUT) == _LEFT_OUT}
        if absent - self._line.absent:
            notice(
                f"save_state was called on the main process, and {GRACE:g} seconds later not on rank "
                f"{', '.join(map(str, sorted(absent)))}: the checkpoint is without what those keep for themselves (random states, "
                "where their loaders stand). Call save_state on every process; where it is meant so, later saves don't wait."
            )
        self._line.absent = absent
        return absent | elsewhere

    def _place_of(self, rank: int) -> str | None:
        key = f"{self._number}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _say(self, rank: int, place: str) -> str:
        said: str = self._store.compare_set(f"{self._number}/{rank}", "", place).decode()
        return said

    def _mourn(self, ranks: AbstractSet[int]) -> None:
        for rank in sorted(ranks):
            if self._line.presence.is_dead(rank):
                raise CheckpointError(
                    f"Rank {rank} has died before it wrote its files, so there is no new checkpoint; what was there before is "
                    "unchanged. Look in that rank's output for the cause, and start the run again."
                )

    def _wait_for(self, rank: int) -> None:
        end = time.monotonic() + LIMIT.total_seconds()
        while True:
            try:
                self._store.wait([f"{self._number}/{rank}/done"], _LOOK)
                return
            except RuntimeError as error:
                self._mourn({rank})
                if time.monotonic() > end:
                    raise CheckpointError(f"Rank {rank} did not write its files: {error}") from error


class Following(Alone):
    """
    Another process: it finds the save of the main one that it has a part in.

    That is the one to the same folder. Where the main process has saved to another folder in the same step and does not come
    to this one, each process was given a folder of its own, and this one brings its own files to its place alone.
    """

    def __init__(self, line: Line, folder: Path, moment: str) -> None:
        super().__init__()
        self._line, self._store, self._folder, self._moment = line, line.store, folder, moment
        self._number = 0

    def begin(self, clear: Callable[[], None]) -> None:
        try:
            self._find()
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._folder} was not written: the main process does not save, or is gone. {error}"
            ) from error
        if self.is_apart:
            clear()

    def finish(self, complaint: str | None, commit: Callable[[], None]) -> None:
        if self.is_apart:
            super().finish(complaint, commit)
            return
        self._store.set(f"{self._number}/{self._line.world.rank}/done", complaint or _FINE)
        verdict = self._verdict()
        if verdict != _FINE:
            raise CheckpointError(complaint or f"{self._folder} was not written: another process failed. {verdict}")

    def _find(self) -> None:
        passed: int | None = None
        elsewhere: set[int] = set()
        end = time.monotonic() + LIMIT.total_seconds()
        while not self._number:
            newest = self._store.add("saves", 0)
            for number in self._line.unsettled(newest):
                self._store.wait([f"{number}/open"], LIMIT)
                if self._is_mine(number):
                    # what was saved elsewhere until now was not meant for this process
                    self._line.past |= elsewhere
                    return
                if self._might_be_mine(number):
                    passed = number
                    elsewhere.add(number)
            if passed is None:
                self._store.wait([f"{newest + 1}/open"], timedelta(seconds=max(0.1, end - time.monotonic())))
            elif not self._comes_again(passed, newest + 1):
                self._go_apart(passed)
                return

    def _is_mine(self, number: int) -> bool:
        opening = self._opening(number)
        if opening["folder"] != str(self._folder):
            return False
        said = self._say(number, _JOINED)
        if said == _JOINED or opening["moment"] == self._moment:
            # left out in the same step: this process is late, and puts its files beside those that are there
            self._line.past.add(number)
            self._number, self.token = number, opening["token"]
            return True
        if said == _LEFT_OUT:
            self._line.past.add(number)
        return False

    def _might_be_mine(self, number: int) -> bool:
        """Whether the main process was in this save, to another folder, while this one was in its own."""
        opening = self._opening(number)
        if opening["folder"] == str(self._folder):
            return False
        return self._say(number, _ELSEWHERE) == _ELSEWHERE or opening["moment"] == self._moment

    def _comes_again(self, passed: int, following: int) -> bool:
        self._store.wait([f"{passed}/verdict"], LIMIT)
        try:
            self._store.wait([f"{following}/open"], timedelta(seconds=self._line.settle))
        except dist.DistStoreError:
            return False
        return True

    def _go_apart(self, passed: int) -> None:
        self.is_apart = True
        self._line.past.add(passed)
        self._line.settle = SETTLE / 10
        self._number = passed
        notice(
            f"save_state was called with {self._folder} on rank {self._line.world.rank}, and with "
            f"{self._opening(passed)['folder']} on the main process: this process's own files are in its folder, and those "
            "that all have in common in the main process's. Pass the same folder on every process."
        )

    def _opening(self, number: int) -> dict[str, str]:
        opening: dict[str, str] = json.loads(self._store.get(f"{number}/open"))
        return opening

    def _say(self, number: int, place: str) -> str:
        said: str = self._store.compare_set(f"{number}/{self._line.world.rank}", "", place).decode()
        return said

    def _verdict(self) -> str:
        try:
            self._store.wait([f"{self._number}/verdict"], LIMIT)
            verdict: str = self._store.get(f"{self._number}/verdict").decode()
            return verdict
        except RuntimeError as error:
            # a main process that has ended in peace has taken the store with it
            content = manifest.read(self._folder) if self._folder.is_dir() else None
            written = content is not None and content["token"] == self.token
            return _FINE if written else f"The main process is gone: {error}"
