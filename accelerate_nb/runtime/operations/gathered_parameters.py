"""Parameters that a strategy keeps in parts, whole for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate_nb.errors import NotYetError
from accelerate_nb.runtime.world.accelerator_state import AcceleratorState


@contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: Any,  # noqa: ARG001 - they are whole already
    modifier_rank: int | None = None,  # noqa: ARG001 - nothing to send
    fwd_module: Any = None,  # noqa: ARG001 - nothing to register
    enabled: bool = True,
) -> Iterator[None]:
    """
    A block in which parameters are whole on every process; without DeepSpeed's ZeRO-3, which parts them, they always are.

    >>> with GatheredParameters(model.parameters()): model.initialize()  # doctest: +SKIP
    """
    plugin: Any = AcceleratorState().deepspeed_plugin
    if enabled and plugin is not None and plugin.is_zero3_init_enabled():
        raise NotYetError(
            "GatheredParameters was called with DeepSpeed's ZeRO-3, and parameters can't be put together here yet. "
            "Use `deepspeed.zero.GatheredParameters`."
        )
    yield
