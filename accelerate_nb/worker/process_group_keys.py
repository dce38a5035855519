"""Default process groups that find each other at a store which this package hosts: each has keys of its own there."""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any

from accelerate_nb.config.environment import set_variables


@dataclass(eq=False)
class _GroupKeys:
    """The ports of the stores at which this rank's groups get keys of their own, each with the number of its next group."""

    numbers: dict[str, Iterator[int]] = field(default_factory=dict)
    generation: str = ""


_groups = _GroupKeys()


def separate_groups(port: int) -> None:
    """Give every default group of this rank that is made by `env://` at the store with this port keys of its own there."""
    # torch uses the same keys for all groups of a process, where a second one finds the addresses of the first one's
    # closed connections (`torch.distributed.rendezvous._env_rendezvous_handler`). Ranks agree on a group's number: all
    # make the same groups in the same order.
    _groups.numbers.setdefault(str(port), itertools.count())
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    # what torch calls for `init_process_group("env://")`: it gives the store, the rank and the world's size
    handler: Callable[..., Iterator[tuple[Any, int, int]]] = handlers["env"]
    if hasattr(handler, "__wrapped__"):
        return

    @wraps(handler)
    def separating(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        from torch.distributed import PrefixStore

        if (numbers := _groups.numbers.get(os.environ.get("MASTER_PORT", ""))) is None:
            # the function chose a port, at which rank 0 has to host the store
            with set_variables({"TORCHELASTIC_USE_AGENT_STORE": "False"}, os.environ):
                found = next(handler(url, *args, **kwargs))
            yield found
            return
        for store, rank, size in handler(url, *args, **kwargs):
            yield PrefixStore(f"accelerate_nb/groups/{_groups.generation}/{next(numbers)}", store), rank, size

    handlers["env"] = separating


def begin_generation(name: str) -> None:
    """Count the groups anew, under a name that is used once: after a failure, ranks may have made different numbers of them."""
    _groups.generation = name
    _groups.numbers = {store: itertools.count() for store in _groups.numbers}
