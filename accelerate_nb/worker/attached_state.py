"""The state of a process that runs already, suspended while a launched function runs in it."""

from __future__ import annotations

from typing import Any


def lasting_store() -> Any:
    """The `torch.distributed.Store` through which this process finds the others, for as long as it runs."""
    from accelerate_nb.runtime.world import registry

    return registry.lasting_store()


def suspend() -> Any:
    """Suspend the groups and states that this process has made; the `Aside` that is returned brings them back."""
    from accelerate_nb.runtime.world.suspend import suspend

    return suspend()
