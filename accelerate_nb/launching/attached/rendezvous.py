"""Where processes that are there already meet for one call, and what they tell each other of it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.packing import Bytes
from accelerate_nb.launching.plan import meeting_place
from accelerate_nb.launching.seat import LOOPBACK
from accelerate_nb.notices import notice

# A wait looks so often whether others have come: the shortest pause between two looks, and the longest. (The store's own
# wait can't be interrupted, and torch warns of each one whose time is over.)
_SOON, _SELDOM = 0.001, 0.05
# A store takes 8 MB at once.
_PIECE = 4 << 20
# How long the host of a store waits for the others to have read what they want.
_PARTING = 10.0

Decision: TypeAlias = Literal["meet", "part"]


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many processes this one is, and where they met when they were started."""

    rank: int
    size: int
    address: str

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Place:
        """The place that a launcher gave to this process."""
        return cls(int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment.get("MASTER_ADDR", LOOPBACK))

    @property
    def is_here(self) -> bool:
        """Whether rank 0 is known by an address that only this machine can reach."""
        return self.address in {LOOPBACK, "localhost", "::1"}


class _Calls:
    """How many calls there were in this process; the last one's gathering stays, since others may still read from it."""

    count = 0
    last: Gathering | None = None
    told_of_size = False


_calls: ContextVar[_Calls] = ContextVar("accelerate_nb_calls", default=_Calls())  # noqa: B039 - shared by all threads


class Gathering:
    """
    A store of one call's own, which every process comes to: groups that are made meanwhile find no traces of former ones.

    Rank 0 hosts it, and tells where it is at a store that all know already.
    """

    def __init__(self, place: Place, name: str, store: Any, environ: Mapping[str, str]) -> None:
        self.place, self.name, self.environ = place, name, environ
        self._store = store
        self._ranks = range(place.size)

    @classmethod
    def of(cls, place: Place, lasting: Any, number: int) -> Gathering:
        """The gathering of a process's so-and-so-many-th call; `lasting` is the store that all know."""
        from torch.distributed import HashStore, TCPStore

        name = f"accelerate_nb/calls/{number}"
        if place.size == 1:
            return cls(place, name, HashStore(), {})
        if place.rank == 0:
            host, store = _hosted(place)
            lasting.set(name, f"{host}\n{store.port}")
        else:
            _wait(lasting, [name])
            host, port = lasting.get(name).decode().split("\n")
            store = TCPStore(host, int(port), is_master=False)
        environ = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(store.port),
            # `init_process_group("env://")` is a client of the store that is there, on every rank
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return cls(place, name, store, environ)

    def of_main(self, name: str, say: Callable[[], str]) -> str:
        """What rank 0 says, on all ranks."""
        if self.place.rank == 0:
            self._store.set(name, say())
        _wait(self._store, [name])
        said: str = self._store.get(name).decode()
        return said

    def come(self, what: str) -> None:
        """Wait until every process has come here."""
        self._store.set(f"{what}/{self.place.rank}", "")
        _wait(self._store, [f"{what}/{rank}" for rank in self._ranks])

    def tell(self, entries: Sequence[Bytes], *, failed: bool) -> None:
        """Tell all others what came of the call here."""
        rank = self.place.rank
        said = memoryview(pickle.dumps([bytearray(entry) for entry in entries], protocol=5))
        pieces = [said[start : start + _PIECE] for start in range(0, len(said), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"told/{rank}/{number}", bytes(piece))
        if failed:
            self._store.set("failed", "")
        self._store.set(f"done/{rank}", str(len(pieces)))

    def wait(self, patience: float) -> tuple[int, ...]:
        """Wait until all have told, or some have failed and the others have had so many seconds; gives those that have told."""
        deadline: float | None = None
        keys = [f"done/{rank}" for rank in self._ranks]
        for _ in _looks(self._store, keys):
            if deadline is None and _is_there(self._store, ["failed"]):
                deadline = time.monotonic() + patience
            if deadline is not None and time.monotonic() >= deadline:
                break
        return tuple(rank for rank, key in zip(self._ranks, keys, strict=True) if _is_there(self._store, [key]))

    def heard(self, rank: int) -> list[Bytes]:
        """What a rank has told."""
        count = int(self._store.get(f"done/{rank}"))
        pieces = [self._store.get(f"told/{rank}/{number}") for number in range(count)]
        entries: list[Bytes] = pickle.loads(b"".join(pieces))
        return entries

    def decide(self, wish: Decision) -> Decision:
        """What the first to decide has wished: whether processes that were apart meet again. All go by it."""
        decided: Decision = self._store.compare_set("decision", "", wish).decode()
        return decided

    def leave(self, *, wait: bool) -> None:
        """Nothing is read any more; who hosts the store waits for those that read."""
        _calls.get().last = self
        self._store.set(f"left/{self.place.rank}", "")
        if not wait or self.place.rank > 0:
            return
        deadline = time.monotonic() + _PARTING
        for _ in _looks(self._store, [f"left/{rank}" for rank in self._ranks]):
            if time.monotonic() > deadline:
                return


def gather(lasting: Any, place: Place) -> Gathering:
    """The gathering for this process's next call."""
    calls = _calls.get()
    calls.count += 1
    return Gathering.of(place, lasting, calls.count)


def tell_of_size(asked: int) -> None:
    """Say once, on rank 0, that there are other than so many processes as were asked for."""
    place, calls = Place.read(os.environ), _calls.get()
    if asked == place.size or place.rank > 0 or calls.told_of_size:
        return
    calls.told_of_size = True
    notice(
        f"num_processes={asked} was asked for in a process that a launcher started already, as one of {place.size}: the "
        f"function runs on these {place.size}."
    )


def _hosted(place: Place) -> tuple[str, Any]:
    from torch.distributed import TCPStore

    if not place.is_here:
        return place.address, TCPStore(place.address, 0, None, True, wait_for_workers=False)
    sock = meeting_place(0)
    port = sock.getsockname()[1]
    # the store closes the socket when it ends
    return LOOPBACK, TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=sock.detach())


def _wait(store: Any, keys: Sequence[str]) -> None:
    """Wait for others as long as it takes: the launcher that started them ends all when one has died."""
    for _ in _looks(store, keys):
        continue


def _looks(store: Any, keys: Sequence[str]) -> Iterator[None]:
    """One look after the other, until all keys are there."""
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
            f"This process waited for the others ({', '.join(keys)}), and what they meet at has gone with rank 0, which has "
            f"ended ({str(error).splitlines()[0]}). What rank 0 wrote last says why."
        ) from None
