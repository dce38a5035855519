"""The function and its arguments, ready to travel: one memory file that every worker maps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from accelerate_nb.devices.randomness import RandomStates, random_states_here
from accelerate_nb.launching.culprits import explain
from accelerate_nb.launching.handles import TravellingFd, collecting
from accelerate_nb.launching.main_module import install_main
from accelerate_nb.launching.packing import map_entries, memory_file, write_entries
from accelerate_nb.launching.pickling import dump, load
from accelerate_nb.launching.sources import Sources, sources_here


@dataclass(frozen=True, slots=True)
class Call:
    """A function and what it is called with."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        try:
            return self.function(*self.args, **self.kwargs)
        except SystemExit as error:
            # sys.exit() and sys.exit(0) are a script's way to say that it is done
            if error.code in {None, 0}:
                return None
            raise

    @property
    def name(self) -> str:
        """What a person calls the function."""
        inner = getattr(self.function, "func", self.function)
        return str(getattr(inner, "__name__", type(inner).__name__))

    def parts(self) -> dict[str, Any]:
        """What the call is made of, by the names that a person would use."""
        named = {f"args[{index}]": value for index, value in enumerate(self.args)}
        return {self.name: self.function, **named, **self.kwargs}


class Payload(Protocol):
    """What a worker runs; `descriptor` is -1 where nothing has to travel."""

    @property
    def descriptor(self) -> int:
        """The memory file."""

    @property
    def more(self) -> tuple[int, ...]:
        """Descriptors that travel along."""

    @property
    def sources(self) -> Sources:
        """The notebook's own lines."""

    def unpack(self) -> Callable[[], Any]:
        """The call, in the worker."""

    def close(self) -> None:
        """Give back what the payload holds in this process."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """A call that a forked worker finds in its memory."""

    call: Callable[[], Any]
    sources: Sources
    states: RandomStates
    descriptor: int = -1
    more: tuple[int, ...] = ()

    def unpack(self) -> Callable[[], Any]:
        """The call itself."""
        # Python gives its `random` a new seed in every forked process
        self.states.install()
        return self.call

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Packed:
    """
    A call in a memory file, with the notebook's lines before it and large buffers behind it.

    Its data cost one copy for any number of workers: each maps the file for itself, and a write changes only its own view.
    """

    descriptor: int
    more: tuple[int, ...]
    sources: Sources

    def unpack(self) -> Callable[[], Any]:
        """The call, its arrays and tensors in the file's own memory."""
        _, *pickled = map_entries(self.descriptor)
        self.sources.install()
        TravellingFd.arrived = self.more
        states, call, names = load(pickled)
        install_main(names)
        states.install()
        unpacked: Callable[[], Any] = call
        return unpacked

    def close(self) -> None:
        """Close the memory file and the descriptors that travel along."""
        for descriptor in (self.descriptor, *self.more):
            os.close(descriptor)


def arrived(descriptor: int, more: Sequence[int]) -> Packed:
    """The payload behind a worker's descriptors."""
    head = map_entries(descriptor)[0]
    return Packed(descriptor, tuple(more), Sources(**json.loads(bytes(head))))


def inherit(call: Call) -> Inherited:
    """A call for workers that are forked from this process."""
    return Inherited(call, sources_here(), random_states_here())


def pack(call: Call) -> Packed:
    """
    A call as one memory file.

    Raises `PayloadError`, which names the variable that can't travel, its type and what captures it.
    """
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    sources = sources_here()
    with collecting() as collector:
        try:
            names: dict[str, Any] = {}
            entries = dump((random_states_here(), call, names), names)
        except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
            raise explain(call.parts(), error, sources) from None
        descriptor = memory_file("accelerate_nb_payload")
        try:
            write_entries(descriptor, [json.dumps(sources.to_plain()).encode(), *entries])
        except BaseException:
            os.close(descriptor)
            raise
        return Packed(descriptor, tuple(collector.descriptors), sources)
