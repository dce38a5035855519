"""The agreement of a save's processes on its result, without a collective operation."""

from __future__ import annotations

import hashlib
import hmac
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
from accelerate_nb.rank_local import RankLocal
from accelerate_nb.runtime.checkpoints import manifest
from accelerate_nb.runtime.checkpoints.liveness import ProcessLiveness
from accelerate_nb.runtime.world.registry import has_own_store
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user

# How long the others' files may take once they have begun to save.
LIMIT = timedelta(minutes=30)
# How long the main process waits for the others to begin, before it goes on without them.
JOIN_TIMEOUT = 20.0
# How long a process waits for the main one to come to its folder, once that has saved to another in the same step.
SETTLE = 5.0
# The interval at which a process that waits for another one checks whether that is alive.
_LIVENESS_INTERVAL = timedelta(seconds=1)
_FINE = "fine"
# The status of a process in a save of the main one: the first claim holds.
_JOINED, _ELSEWHERE, _LEFT_OUT = "joined", "elsewhere", "left out"


class SingleProcessCommit:
    """The commit of a single process."""

    absent: AbstractSet[int] = frozenset()
    # whether this process has to commit a folder of its own
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


class SignedStore:
    """
    Texts in a store that every user of the machine can write to, each with a signature that only processes of the run can make.

    The key of the signatures is the run's id (`TORCHELASTIC_RUN_ID`), which a launch draws by chance. Raises `CheckpointError` for a
    text that has another signature.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._key = os.environ.get("TORCHELASTIC_RUN_ID", "").encode()
        self.add, self.check, self.wait = store.add, store.check, store.wait

    def set(self, name: str, text: str) -> None:
        """Keep a text."""
        self._store.set(name, self._signed(name, text))

    def get(self, name: str) -> str:
        """The text of a name."""
        return self._text(name, self._store.get(name))

    def set_first(self, name: str, text: str) -> str:
        """Keep a text where there is none; returns the one that is there then."""
        return self._text(name, self._store.compare_set(name, "", self._signed(name, text)))

    def _signed(self, name: str, text: str) -> str:
        return hmac.new(self._key, f"{name}\n{text}".encode(), hashlib.sha256).hexdigest() + text

    def _text(self, name: str, value: bytes) -> str:
        text = value[64:].decode(errors="replace")
        if not hmac.compare_digest(self._signed(name, text).encode(), value):
            raise CheckpointError(
                f"{name!r} in the run's store was written by a process that is none of the run: no checkpoint was written. Another user "
                "of this machine may have done so; docs/security.md names what can be written to."
            )
        return text


class CommitChannel:
    """One process's connection to the others about saves, which no collective operation uses."""

    def __init__(self, world: World) -> None:
        store: Any = world.store
        self.world = world
        self.store = SignedStore(dist.PrefixStore("accelerate_nb/checkpoint", store.clone()))
        self.liveness = ProcessLiveness(world, self.store)
        # processes that were not in the last save
        self.absent: set[int] = set()
        # the main process's saves that this one has had its part in, or has none in
        self.past: set[int] = set()
        self.settle = SETTLE
        # in a store that was another group's before, its saves do not concern this process; of its own group's none was before it,
        # even if the main process has begun one while this one was still making its Accelerator
        self._first = 1 if has_own_store() else self.store.add("saves", 0) + 1

    def unsettled(self, newest: int) -> list[int]:
        """The main process's saves, up to the newest, of which this one's part is not decided yet."""
        return [item for item in range(self._first, newest + 1) if item not in self.past]

    def claim(self, number: int, rank: int, status: str) -> str:
        """The status of a process in a save of the main one: this one, unless there was another before."""
        return self.store.set_first(f"{number}/{rank}", status)

    def agreement(self, folder: Path, moment: str) -> SingleProcessCommit:
        """The agreement of the processes about one save; `moment` identifies the training's step."""
        return (MainProcessCommit if self.world.is_main else OtherProcessCommit)(self, folder, moment)


# by group: a process makes one connection for all of its Accelerators, and a new one after it has joined another group
_channels: RankLocal[WeakKeyDictionary[Any, CommitChannel]] = RankLocal(WeakKeyDictionary)


def commit_channel_of(world: World) -> CommitChannel:
    """The one connection of this process's group over which its saves are agreed on."""
    channels, group = _channels.get(), world.group
    if group not in channels:
        channels[group] = CommitChannel(world)
    return channels[group]


class MainProcessCommit(SingleProcessCommit):
    """
    The main process among others: it publishes its folder, waits until their files are written, and commits.

    Loops that call `save_state` on the main process alone, as Accelerate lets them, are not left waiting: who has not begun
    after a while is taken to be absent, unless it has died: then the checkpoint does not appear, as it could not be resumed.
    """

    def __init__(self, channel: CommitChannel, folder: Path, moment: str) -> None:
        super().__init__()
        self.absent = set(channel.absent)
        self._channel, self._store = channel, channel.store
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
        self.absent = self._absent_ranks()
        others = [rank for rank in range(1, self._channel.world.size) if rank not in self.absent]
        for rank in others:
            self._wait_for(rank)
        replies = [complaint or _FINE, *(self._store.get(f"{self._number}/{rank}/done") for rank in others)]
        return next((item for item in replies if item != _FINE), _FINE)

    def _absent_ranks(self) -> set[int]:
        """The processes that have not begun to save, some time after this one has, or that save elsewhere."""
        missing = set(range(1, self._channel.world.size))
        elsewhere: set[int] = set()
        end = self._opened + JOIN_TIMEOUT
        while missing:
            begun = {rank for rank in missing if self._store.check([f"{self._number}/{rank}"])}
            elsewhere |= {rank for rank in begun if self._store.get(f"{self._number}/{rank}") == _ELSEWHERE}
            missing -= begun
            if missing <= self._channel.absent or time.monotonic() > end:
                break
            self._fail_if_dead(missing)
            time.sleep(0.02)
        self._fail_if_dead(missing)
        absent = {rank for rank in missing if self._channel.claim(self._number, rank, _LEFT_OUT) == _LEFT_OUT}
        if absent - self._channel.absent:
            warn_user(
                f"save_state was called on the main process, and {JOIN_TIMEOUT:g} seconds later not on rank "
                f"{', '.join(map(str, sorted(absent)))}: the checkpoint lacks the own state of these ranks (random states, "
                "positions of loaders). Call save_state on every process; where that is intended, later saves don't wait."
            )
        self._channel.absent = absent
        return absent | elsewhere

    def _fail_if_dead(self, ranks: AbstractSet[int]) -> None:
        for rank in sorted(ranks):
            if self._channel.liveness.is_dead(rank):
                raise CheckpointError(
                    f"Rank {rank} has died before it wrote its files, so there is no new checkpoint; what was there before is "
                    "unchanged. Look in that rank's output for the cause, and start the run again."
                )

    def _wait_for(self, rank: int) -> None:
        end = time.monotonic() + LIMIT.total_seconds()
        while True:
            try:
                self._store.wait([f"{self._number}/{rank}/done"], _LIVENESS_INTERVAL)
                return
            except RuntimeError as error:
                self._fail_if_dead({rank})
                if time.monotonic() > end:
                    raise CheckpointError(f"Rank {rank} did not write its files: {error}") from error


class OtherProcessCommit(SingleProcessCommit):
    """
    Another process: it finds the save of the main one that it has a part in.

    That is the one to the same folder. Where the main process has saved to another folder in the same step and does not come
    to this one, each process was given a folder of its own, and this one commits its own files alone.
    """

    def __init__(self, channel: CommitChannel, folder: Path, moment: str) -> None:
        super().__init__()
        self._channel, self._store, self._folder, self._moment = channel, channel.store, folder, moment
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
        self._store.set(f"{self._number}/{self._channel.world.rank}/done", complaint or _FINE)
        verdict = self._verdict()
        if verdict != _FINE:
            raise CheckpointError(complaint or f"{self._folder} was not written: another process failed. {verdict}")

    def _find(self) -> None:
        passed: int | None = None
        elsewhere: set[int] = set()
        end = time.monotonic() + LIMIT.total_seconds()
        while not self._number:
            newest = self._store.add("saves", 0)
            for number in self._channel.unsettled(newest):
                self._store.wait([f"{number}/open"], LIMIT)
                if self._is_mine(number):
                    # what was saved elsewhere until now was not meant for this process
                    self._channel.past |= elsewhere
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
        claimed = self._channel.claim(number, self._channel.world.rank, _JOINED)
        if claimed == _JOINED or opening["moment"] == self._moment:
            # left out in the same step: this process is late, and puts its files beside those that are there
            self._channel.past.add(number)
            self._number, self.token = number, opening["token"]
            return True
        if claimed == _LEFT_OUT:
            self._channel.past.add(number)
        return False

    def _might_be_mine(self, number: int) -> bool:
        """Whether the main process was in this save, to another folder, while this one was in its own."""
        opening = self._opening(number)
        if opening["folder"] == str(self._folder):
            return False
        claimed = self._channel.claim(number, self._channel.world.rank, _ELSEWHERE)
        return claimed == _ELSEWHERE or opening["moment"] == self._moment

    def _comes_again(self, passed: int, following: int) -> bool:
        self._store.wait([f"{passed}/verdict"], LIMIT)
        try:
            self._store.wait([f"{following}/open"], timedelta(seconds=self._channel.settle))
        except dist.DistStoreError:
            return False
        return True

    def _go_apart(self, passed: int) -> None:
        self.is_apart = True
        self._channel.past.add(passed)
        self._channel.settle = SETTLE / 10
        self._number = passed
        warn_user(
            f"save_state was called with {self._folder} on rank {self._channel.world.rank}, and with "
            f"{self._opening(passed)['folder']} on the main process: this process's own files are in its folder, and those "
            "that all have in common in the main process's. Pass the same folder on every process."
        )

    def _opening(self, number: int) -> dict[str, str]:
        opening: dict[str, str] = json.loads(self._store.get(f"{number}/open"))
        return opening

    def _verdict(self) -> str:
        try:
            self._store.wait([f"{self._number}/verdict"], LIMIT)
            return self._store.get(f"{self._number}/verdict")
        except CheckpointError:
            raise
        except RuntimeError as error:
            # a main process that has ended normally has taken the store with it
            content = manifest.read(self._folder) if self._folder.is_dir() else None
            written = content is not None and content["token"] == self.token
            return _FINE if written else f"The main process is gone: {error}"
