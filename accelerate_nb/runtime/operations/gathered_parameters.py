"""Parameters that a strategy keeps in parts, whole for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate_nb.runtime.world.state import AcceleratorState


@contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """
    A block in which parameters are whole on every process; without DeepSpeed's ZeRO-3, which parts them, they always are.

    All processes enter it. What the process `modifier_rank` changes in them is on all processes after it.

    >>> with GatheredParameters(model.parameters()): model.initialize()  # doctest: +SKIP
    """
    strategy: Any = AcceleratorState().strategy
    if not enabled or strategy is None:
        yield
        return
    with strategy.gathered(params, modifier_rank, fwd_module):
        yield
