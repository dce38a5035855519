"""The function and its arguments, ready to travel: one memory file that every worker maps."""

import inspect
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from typing import Any, TypeAlias

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.rank.rng_state import (
    OutputSettings,
    RandomStates,
    current_output_settings,
    current_random_states,
    current_torch_settings,
)
from accelerate_nb.sources.cells import CellSources, current_sources, name_in_warnings
from accelerate_nb.transport.logging_state import current_logging
from accelerate_nb.transport.memory_file import map_entries, memory_file, write_entries
from accelerate_nb.transport.serializer import dump, explain, install_main, load


class TransferredFd:
    """A descriptor that goes along with a payload; in the worker, `detach()` gives the worker's own."""

    # the worker's descriptors, in the order of their indices
    descriptors: tuple[int, ...] = ()

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """A descriptor of one's own; the caller closes it."""
        return os.dup(type(self).descriptors[self._index])


class FdCollector:
    """A stand-in for multiprocessing's process being spawned: it collects the descriptors that it will need, `file` first."""

    def __init__(self, file: int) -> None:
        self.descriptors = [file]

    def duplicate_for_child(self, descriptor: int) -> int:
        """Take a descriptor along; returns its index."""
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1

    def DupFd(self, index: int) -> TransferredFd:  # noqa: N802 - the name that multiprocessing calls
        """The object that is pickled in place of a descriptor."""
        return TransferredFd(index)


def check_function(function: Any) -> None:
    """Raise a `ConfigurationError` for what is no function that a rank can call and wait for."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    if not callable(function):
        raise ConfigurationError(
            f"A function is what a launcher runs, but {function!r} can't be called. "
            "Pass the function itself, without parentheses, and its arguments as args=(...)."
        )
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    codes = (inner, getattr(type(inner), "__call__", None))  # noqa: B004 - of an object that is called it is the method
    if any(inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code) for code in codes):
        raise ConfigurationError(
            f"{getattr(inner, '__name__', type(inner).__name__)} is an async function, and a launcher calls it without awaiting it: "
            "nothing of it would run. Pass a function that is none, such as one that calls asyncio.run(...)."
        )


def is_no_failure(error: BaseException) -> bool:
    """Whether code was left by `sys.exit()` or `sys.exit(0)`, a script's way to end without an error."""
    # a code may be any object, such as what `main` returns
    return isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and error.code == 0))


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function and what it is called with."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        try:
            return self.function(*self.args, **self.kwargs)
        except SystemExit as error:
            if is_no_failure(error):
                return None
            raise

    @property
    def name(self) -> str:
        """The name that a person calls the function."""
        inner = getattr(self.function, "func", self.function)
        return str(getattr(inner, "__name__", type(inner).__name__))

    def parts(self) -> dict[str, Any]:
        """The parts of the call, by the names that a person would use."""
        named = {f"args[{index}]": value for index, value in enumerate(self.args)}
        return {self.name: self.function, **named, **self.kwargs}


@dataclass(frozen=True, slots=True)
class InheritedCall:
    """A call that a forked worker finds in its memory."""

    call: Callable[[], Any]
    sources: CellSources
    states: RandomStates
    # where NumPy keeps its options for each thread, and another one than the notebook's forks
    output_settings: OutputSettings
    descriptors: tuple[int, ...] = ()

    def unpack(self) -> Callable[[], Any]:
        # Python gives its `random` a new seed in every forked process
        self.states.install()
        self.output_settings.install()
        name_in_warnings(self.sources.numbers)
        return self.call

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class PackedCall:
    """A call in a memory file, of which each worker maps its own view: one copy for any number of workers."""

    # the memory file, and those of multiprocessing's that travel along
    descriptors: tuple[int, ...]
    sources: CellSources

    def unpack(self) -> Callable[[], Any]:
        """The call, its arrays and tensors in the file's own memory."""
        _, *pickled = map_entries(self.descriptors[0])
        self.sources.install()
        TransferredFd.descriptors = self.descriptors
        *states, call, names = load(pickled)
        install_main(names)
        for state in filter(None, states):
            state.install()
        unpacked: Callable[[], Any] = call
        return unpacked

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


# The call that a worker runs; it has no descriptors where nothing has to travel.
Payload: TypeAlias = InheritedCall | PackedCall


def received_payload(descriptor: int, more: Sequence[int]) -> PackedCall:
    """The payload behind a worker's descriptors."""
    head = map_entries(descriptor)[0]
    return PackedCall((descriptor, *more), CellSources(**json.loads(bytes(head))))


def inherit(call: FunctionCall) -> InheritedCall:
    """A call for workers that are forked from this process."""
    return InheritedCall(call, current_sources(), current_random_states(), current_output_settings())


def pack(call: FunctionCall) -> PackedCall:
    """A call as one memory file; raises `PayloadError`, which names what can't travel, its type and what captures it."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    sources, before = current_sources(), get_spawning_popen()
    collector = FdCollector(memory_file("accelerate_nb_payload"))
    # while something is pickled for workers, multiprocessing's objects see a process being spawned
    set_spawning_popen(collector)  # type: ignore[arg-type]  # it has the methods that are called
    try:
        names: dict[str, Any] = {}
        try:
            states = (current_random_states(), current_torch_settings(), current_output_settings(), current_logging())
            entries = dump((*states, call, names), names)
        except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
            raise explain(call.parts(), error, sources) from None
        head = {"lines": dict(sources.lines), "numbers": dict(sources.numbers)}
        write_entries(collector.descriptors[0], [json.dumps(head).encode(), *entries])
    except BaseException:
        for descriptor in collector.descriptors:
            os.close(descriptor)
        raise
    finally:
        set_spawning_popen(before)
    return PackedCall(tuple(collector.descriptors), sources)
