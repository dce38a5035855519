"""The rendezvous of processes that a launcher started: a store for one call, and the reports in it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.planning.plan import host_store, rendezvous_socket
from accelerate_nb.transport.memory_file import Bytes
from accelerate_nb.transport.rank_info import LOOPBACK
from accelerate_nb.user_warnings import warn_user
from accelerate_nb.worker.process_group_keys import separate_groups

# A wait polls so often whether others have come: the shortest pause between two polls, and the longest. (The store's own
# wait can't be interrupted, and torch warns of each one whose time is over.)
_SOON, _SELDOM = 0.001, 0.05
# A store takes 8 MB at once.
_PIECE = 4 << 20
# How long the host of a store waits for the others to have read what they want.
_PARTING = 10.0

Decision: TypeAlias = Literal["rejoin", "part"]


@dataclass(frozen=True, slots=True)
class AttachedRank:
    """The rank of this process, the number of processes, and the address at which they met when they were started."""

    rank: int
    size: int
    address: str

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> AttachedRank:
        """The rank that a launcher gave to this process."""
        return cls(int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment.get("MASTER_ADDR", LOOPBACK))

    @property
    def is_on_loopback(self) -> bool:
        """Whether rank 0 is known by an address that only this machine can reach."""
        return self.address in {LOOPBACK, "localhost", "::1"}


class _CallCounter:
    """The number of calls in this process; the last one's store stays, since others may still read from it."""

    count = 0
    last: CallStore | None = None
    is_size_warned = False


_calls: ContextVar[_CallCounter] = ContextVar("accelerate_nb_calls", default=_CallCounter())  # noqa: B039 - shared by all threads


class CallStore:
    """
    A store of one call's own, which every process joins: groups that are made meanwhile find no traces of former ones.

    Rank 0 hosts it, and writes its address into a store that all know already.
    """

    def __init__(self, attached_rank: AttachedRank, name: str, store: Any, environ: Mapping[str, str]) -> None:
        self.attached_rank, self.name, self.environ = attached_rank, name, environ
        self._store = store
        self._ranks = range(attached_rank.size)

    @classmethod
    def of(cls, attached_rank: AttachedRank, lasting: Any, number: int) -> CallStore:
        """The store of a process's call with this number; `lasting` is the store that all know."""
        from torch.distributed import HashStore, TCPStore

        name = f"accelerate_nb/calls/{number}"
        if attached_rank.size == 1:
            return cls(attached_rank, name, HashStore(), {})
        if attached_rank.rank == 0:
            host, store = _hosted(attached_rank)
            lasting.set(name, f"{host}\n{store.port}")
        else:
            _wait(lasting, [name])
            host, port = lasting.get(name).decode().split("\n")
            store = TCPStore(host, int(port), is_master=False)
        separate_groups(host, int(store.port))
        environ = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(store.port),
            # `init_process_group("env://")` is a client of the store that is there, on every rank
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return cls(attached_rank, name, store, environ)

    def of_main(self, name: str, make: Callable[[], str]) -> str:
        """Rank 0's value, on all ranks."""
        if self.attached_rank.rank == 0:
            self._store.set(name, make())
        _wait(self._store, [name])
        value: str = self._store.get(name).decode()
        return value

    def barrier(self, what: str) -> None:
        """Wait until every process has come to this point."""
        self._store.set(f"{what}/{self.attached_rank.rank}", "")
        _wait(self._store, [f"{what}/{rank}" for rank in self._ranks])

    def send(self, entries: Sequence[Bytes], *, failed: bool) -> None:
        """Send this rank's report to all others."""
        rank = self.attached_rank.rank
        data = memoryview(pickle.dumps([bytearray(entry) for entry in entries], protocol=5))
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"report/{rank}/{number}", bytes(piece))
        if failed:
            self._store.set("failed", "")
        self._store.set(f"done/{rank}", str(len(pieces)))

    def wait(self, timeout: float) -> tuple[int, ...]:
        """Wait until all have reported, or some have failed and the others have had so many seconds; returns the ranks that have."""
        deadline: float | None = None
        keys = [f"done/{rank}" for rank in self._ranks]
        for _ in _checks(self._store, keys):
            if deadline is None and _is_there(self._store, ["failed"]):
                deadline = time.monotonic() + timeout
            if deadline is not None and time.monotonic() >= deadline:
                break
        return tuple(rank for rank, key in zip(self._ranks, keys, strict=True) if _is_there(self._store, [key]))

    def receive(self, rank: int) -> list[Bytes]:
        """The report of a rank, pickled."""
        count = int(self._store.get(f"done/{rank}"))
        pieces = [self._store.get(f"report/{rank}/{number}") for number in range(count)]
        entries: list[Bytes] = pickle.loads(b"".join(pieces))
        return entries

    def decide(self, proposal: Decision) -> Decision:
        """The proposal of the first process to decide: whether all rejoin their groups. Every process follows it."""
        decided: Decision = self._store.compare_set("decision", "", proposal).decode()
        return decided

    def leave(self, *, wait: bool) -> None:
        """Read nothing more; the host of the store waits for those that still read."""
        _calls.get().last = self
        self._store.set(f"left/{self.attached_rank.rank}", "")
        if not wait or self.attached_rank.rank > 0:
            return
        deadline = time.monotonic() + _PARTING
        for _ in _checks(self._store, [f"left/{rank}" for rank in self._ranks]):
            if time.monotonic() > deadline:
                return


def next_call_store(lasting: Any, attached_rank: AttachedRank) -> CallStore:
    """The store for this process's next call."""
    calls = _calls.get()
    calls.count += 1
    return CallStore.of(attached_rank, lasting, calls.count)


def warn_of_size(requested: int) -> None:
    """Warn once, on rank 0, that the number of processes is not the requested one."""
    attached_rank, calls = AttachedRank.read(os.environ), _calls.get()
    if requested == attached_rank.size or attached_rank.rank > 0 or calls.is_size_warned:
        return
    calls.is_size_warned = True
    warn_user(
        f"num_processes={requested} was requested in a process that a launcher started already, as one of {attached_rank.size}: the "
        f"function runs on these {attached_rank.size}."
    )


def _hosted(attached_rank: AttachedRank) -> tuple[str, Any]:
    if attached_rank.is_on_loopback:
        return LOOPBACK, host_store(rendezvous_socket(0))
    from torch.distributed import TCPStore

    return attached_rank.address, TCPStore(attached_rank.address, 0, None, True, wait_for_workers=False)


def _wait(store: Any, keys: Sequence[str]) -> None:
    """Wait for others as long as it takes: the launcher that started them ends all when one has died."""
    for _ in _checks(store, keys):
        continue


def _checks(store: Any, keys: Sequence[str]) -> Iterator[None]:
    """Poll until all keys are there."""
    pause = _SOON
    while not _is_there(store, keys):
        yield
        time.sleep(pause)
        pause = min(pause * 1.5, _SELDOM)


def _is_there(store: Any, keys: Sequence[str]) -> bool:
    from torch.distributed import DistError

    try:
        return bool(store.check(list(keys)))
    except DistError as error:
        raise LaunchError(
            f"This process waited for the others ({', '.join(keys)}), and their store has gone with rank 0, which has "
            f"ended ({str(error).splitlines()[0]}). Rank 0's last output shows why."
        ) from None
