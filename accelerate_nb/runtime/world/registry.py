"""The world that this process has joined."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from accelerate_nb.own import Own
from accelerate_nb.runtime import xla
from accelerate_nb.runtime.world import CONTRACT, Hosts, Meeting, World


class _Held:
    """What one rank holds."""

    world: World | None = None
    made_group: bool = False
    store: dist.Store | None = None
    connection: Hosts | None = None
    joins: int = 0
    life: int = 0
    lives: int = 0
    pid: int = 0
    contract: tuple[str | None, ...] = ()

    def __init__(self) -> None:
        self.shared: dict[str, dict[str, Any]] = {}
        self.lasting: dict[str, dict[str, Any]] = {}
        self.farewells: list[Callable[[], None]] = []


class Shared:
    """
    A class attribute that is the dictionary which all instances of its class share (Hugging Face's `_shared_state`).

    When the world is left, old instances keep what they knew, unless the dictionary is `lasting`: then they are emptied, and
    go on together with the new ones.
    """

    def __init__(self, *, lasting: bool = False) -> None:
        self.lasting = lasting

    def __get__(self, instance: object, owner: type) -> dict[str, Any]:
        held = _held.get()
        if held.world is not None and _outlived(held):
            _leave_behind(held)
        return (held.lasting if self.lasting else held.shared).setdefault(owner.__name__, {})


_held = Own(_Held)


def current_world(meeting: Meeting | None = None) -> World:
    """This process's world; it is joined, in the way that `meeting` says, when nobody has done so yet."""
    held = _held.get()
    if held.world is None or _outlived(held):
        xla.be_a_rank()
        held = _held.get()
        _leave_behind(held)
        held.world = _join(held, meeting or Meeting())
    return held.world


def is_joined() -> bool:
    """Whether this process has a world already; asking does not join one."""
    held = _held.get()
    return held.world is not None and not _outlived(held)


def life() -> int:
    """Which of the worlds that this process has joined this one is: what was made in another belongs to that."""
    return _held.get().life


def before_leaving(farewell: Callable[[], None]) -> None:
    """Have something done while the process group is still there, when the world is left."""
    _held.get().farewells.append(farewell)


def forget() -> None:
    """Leave the world, so that the next one who asks joins anew; a process group that was made here ends here."""
    held = _held.get()
    if held.made_group and held.pid == os.getpid() and (held.connection is not None or dist.is_initialized()):
        for farewell in held.farewells:
            farewell()
        _part(held)
    held.made_group, held.connection = False, None
    _leave_behind(held)


def look_again() -> None:
    """Forget what was found out, but keep the process group: the next one who asks finds its place in it."""
    _held.get().world = None


def meet_over(store: dist.Store) -> None:
    """From now on this process's groups meet over another connection to the store."""
    _held.get().store = store


def meet_again(store: dist.Store) -> bool:
    """Connect the hosts of the ranks anew, over another store; `False` where ranks don't talk through their hosts."""
    held = _held.get()
    if held.connection is None or held.world is None:
        return False
    held.connection.connect(held.world.rank, held.world.size, store)
    return True


def lasting_store() -> dist.Store:
    """The store at which this process meets the others, for as long as it runs."""
    held = _held.get()
    _claim(held)
    if held.store is None:
        held.store = _lasting_store(Meeting())
    return held.store


def put_aside() -> Callable[[], None]:
    """Be a process that has joined nothing yet; what comes back lets it be again what it was."""
    held = _held.get()
    before = dict(vars(held))
    lives = held.lives
    vars(held).clear()
    held.__init__()  # type: ignore[misc]  # the one object that all of the rank's threads know begins anew
    held.lives = lives

    def bring_back() -> None:
        lives = held.lives
        vars(held).clear()
        vars(held).update(before)
        held.lives = lives

    return bring_back


def _claim(held: _Held) -> None:
    """What a forked process has inherited is its parent's."""
    if held.pid != os.getpid():
        held.store, held.connection, held.joins, held.made_group = None, None, 0, False
    held.pid = os.getpid()


def _outlived(held: _Held) -> bool:
    """Whether the held world is another life's: inherited by a launched worker, or its process group is gone."""
    assert held.world is not None
    if held.pid != os.getpid():
        # A forked worker was given a place of its own; a data loader's child was not, and shares its parent's world.
        return held.contract != _contract()
    return held.world.has_ended


def _leave_behind(held: _Held) -> None:
    held.world = None
    held.farewells = []
    held.shared = {}
    for attributes in held.lasting.values():
        attributes.clear()


def _join(held: _Held, meeting: Meeting) -> World:
    _claim(held)
    existed = dist.is_available() and dist.is_initialized()
    world = meeting.join(os.environ, partial(_next_store, held, meeting), held.connection)
    held.connection = world.connection
    held.made_group = world.backend is not None and (held.made_group or not existed or held.connection is not None)
    held.contract = _contract()
    held.life = held.lives = held.lives + 1
    return world


def _next_store(held: _Held, meeting: Meeting) -> dist.Store:
    """
    A store for the next group of this process.

    Every group of a process meets under a name of its own in one store that stays open: a second group that met under the
    first one's name would read the addresses of connections that are closed.
    """
    if held.store is None:
        held.store = _lasting_store(meeting)
    held.joins += 1
    return dist.PrefixStore(f"accelerate_nb/{held.joins}", held.store)


def _lasting_store(meeting: Meeting) -> dist.Store:
    # where somebody hosts a store at the address that all know, there is no room for another
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else meeting.rendezvous()


def _part(held: _Held) -> None:
    """End what connects this process with the others."""
    if held.connection is not None:
        held.connection.group = None
    else:
        dist.destroy_process_group()


def _contract() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in CONTRACT)
