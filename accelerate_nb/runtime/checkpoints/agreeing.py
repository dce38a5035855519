"""How the processes of one save agree on what became of it, without a collective operation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Set as AbstractSet
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import manifest
from accelerate_nb.runtime.world import World

# How long the others' files may take once they have begun to save.
LIMIT = timedelta(minutes=30)
# How long the main process waits for the others to begin, before it goes on without them.
GRACE = 20.0
_FINE = "fine"


class Alone:
    """One process: what it says is what is so."""

    absent: AbstractSet[int] = frozenset()

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


class Together(Alone):
    """
    One process among others: all say through the store when their files are written, and the main process commits.

    It goes through a connection of its own, so that it can be done by a thread while the training uses the process group.
    Loops that call `save_state` on the main process alone, as Accelerate lets them, are not left waiting: who has not begun
    after a while is taken to be absent.
    """

    def __init__(self, world: World, folder: Path, key: str, absent: AbstractSet[int]) -> None:
        super().__init__()
        self.absent = absent
        self._world = world
        self._folder = folder
        self._store: Any = dist.PrefixStore(f"accelerate_nb/checkpoint/{key}", _default_store().clone())
        self._opened = 0.0

    def begin(self, clear: Callable[[], None]) -> None:
        if self._world.is_main:
            try:
                clear()
            except OSError as error:
                self._store.set("verdict", str(error))
                raise
            finally:
                self._opened = time.monotonic()
                self._store.set("open", self.token)
        else:
            self._store.set(f"{self._world.rank}/here", "")
            self._store.wait(["open"], LIMIT)
            self.token = self._store.get("open").decode()

    def finish(self, complaint: str | None, commit: Callable[[], None]) -> None:
        if self._world.is_main:
            verdict = self._decide(complaint, commit)
        else:
            self._store.set(f"{self._world.rank}/done", complaint or _FINE)
            verdict = self._verdict()
        if verdict != _FINE:
            raise CheckpointError(complaint or f"{self._folder} was not written: another process failed. {verdict}")

    def _decide(self, complaint: str | None, commit: Callable[[], None]) -> str:
        self.absent = self._not_here()
        others = [rank for rank in range(1, self._world.size) if rank not in self.absent]
        said = [complaint or _FINE, *self._said(others)]
        verdict = next((each for each in said if each != _FINE), _FINE)
        try:
            if verdict == _FINE:
                verdict = "The main process was interrupted."
                commit()
                verdict = _FINE
        except CheckpointError as error:
            verdict = str(error)
            raise
        finally:
            self._store.set("verdict", verdict)
        return verdict

    def _not_here(self) -> set[int]:
        """The processes that have not begun to save, some time after this one has."""
        missing = set(range(1, self._world.size))
        end = self._opened + GRACE
        while missing:
            missing = {rank for rank in missing if not self._store.check([f"{rank}/here"])}
            if missing <= self.absent or time.monotonic() > end:
                break
            time.sleep(0.02)
        return missing

    def _said(self, others: list[int]) -> list[str]:
        try:
            self._store.wait([f"{rank}/done" for rank in others], LIMIT)
        except RuntimeError as error:
            silent = [rank for rank in others if not self._store.check([f"{rank}/done"])]
            return [f"Rank {', '.join(map(str, silent))} did not write its files: {error}"]
        return [self._store.get(f"{rank}/done").decode() for rank in others]

    def _verdict(self) -> str:
        try:
            self._store.wait(["verdict"], LIMIT)
            verdict: str = self._store.get("verdict").decode()
            return verdict
        except RuntimeError as error:
            # a main process that has ended in peace has taken the store with it
            content = manifest.read(self._folder) if self._folder.is_dir() else None
            written = content is not None and content["token"] == self.token
            return _FINE if written else f"The main process is gone: {error}"


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def agreement(world: World, folder: Path, key: str, absent: AbstractSet[int]) -> Alone:
    """What the processes of `world` agree with about the save that they all know by `key`."""
    return Alone() if world.size == 1 else Together(world, folder, key, absent)
