"""A function called in processes that a launcher started already; each of them gets its result."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from accelerate_nb.config.environment import set_variables
from accelerate_nb.errors import OperationError
from accelerate_nb.failures.rank_result import left_out_text
from accelerate_nb.rank import background_tasks
from accelerate_nb.rank.rng_state import current_random_states
from accelerate_nb.transport.outcome import pack_result
from accelerate_nb.transport.serializer import load
from accelerate_nb.user_warnings import warn_user
from accelerate_nb.worker.process_group_keys import separate_groups

_numbers = itertools.count()


def launched_call(
    call: Callable[[], Any],
    environ: Mapping[str, str],
    results: Literal["main", "all"],
    facts: Callable[[], Any] = lambda: None,
) -> tuple[list[Any], list[Any]]:
    """Call a function as all processes of a launch do; returns rank 0's value or each rank's, and each rank's facts."""
    # The groups and the world that the function leaves end with the call; so does what it drew of the random numbers.
    # An exception is raised as it is, and the other processes find the group closed.
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    rank, size, number = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), next(_numbers)
    if size > 1:
        separate_groups(int(os.environ.get("MASTER_PORT", "29500")))
    was_joined, hf_states, hook = _is_joined(), [state for state in _hf_states() if state], sys.excepthook
    states = current_random_states(gpus=True)
    # with copies of the states, as a worker that was started
    current_random_states().install()
    try:
        # the function may choose a store of its own, as in a worker
        stores = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
        with set_variables({**stores, **environ}, os.environ):
            value = call()
            background_tasks.finish()
        if size == 1:
            return [value], [facts()]
        reports = _gather(number, value, facts(), is_wanted=results == "all" or rank == 0)
        return [value for value, _ in reports][: None if results == "all" else 1], [found for _, found in reports]
    except BaseException:
        background_tasks.salvage()
        raise
    finally:
        if not was_joined and _is_joined():
            _leave()
        for state in _hf_states():
            if all(state is not known for known in hf_states):
                state.clear()
        # each process group that is made has torch write the rank, once more, before every line of a last exception
        sys.excepthook = hook
        states.install()


def _gather(number: int, value: Any, facts: Any, *, is_wanted: bool) -> list[tuple[Any, Any]]:
    """The wanted values and the facts of all ranks, in their order; a value that can't be pickled is `None`, and the main process warns."""
    from accelerate_nb.runtime.operations.collective import gather_object
    from accelerate_nb.runtime.world.registry import Rendezvous, current_world
    from accelerate_nb.runtime.xla.device import is_requested

    # a function that made no Accelerator has no group, and needs no device for one
    was_joined, world = _is_joined(), current_world(Rendezvous(cpu=not is_requested(os.environ)))
    # every process runs the same script, and finds its functions and classes under the same names
    names = frozenset(vars(sys.modules["__main__"]))
    entries, left_out = pack_result(value, names, is_wanted=is_wanted)
    report = (number, [bytearray(entry) for entry in entries], facts, left_out)
    gathered = gather_object([report])
    if not was_joined:
        _leave()
    if len({number for number, *_ in gathered}) > 1:
        raise OperationError(
            f"The result of a launcher's call was to be shared, but the processes have made different numbers of calls: "
            f"{', '.join(f'rank {rank} {count + 1}' for rank, (count, *_) in enumerate(gathered))}. Make each call in all processes; "
            "where a function may fail, let all ranks end."
        )
    text = left_out_text("the function", {rank: left_out for rank, (*_, left_out) in enumerate(gathered)})
    if text and world.rank == 0:
        warn_user(text)
    return [(load(entries) if entries else None, found) for _, entries, found, _ in gathered]


def _is_joined() -> bool:
    torch, registry = sys.modules.get("torch"), sys.modules.get("accelerate_nb.runtime.world.registry")
    has_group = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    return has_group or (registry is not None and registry.is_joined())


def _leave() -> None:
    """End the groups and leave the world, also where others wait in a collective that will never be."""
    from accelerate_nb.runtime.world import registry
    from accelerate_nb.runtime.world.registry import end_groups

    end_groups()
    registry.forget()


def _hf_states() -> Iterator[dict[str, Any]]:
    """The dictionaries that all instances of a class of Hugging Face's own library are made of."""
    module = sys.modules.get("accelerate.state")
    for name in ("PartialState", "AcceleratorState", "GradientState") if module is not None else ():
        yield getattr(module, name)._shared_state
