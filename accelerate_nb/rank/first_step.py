"""A rank's first optimizer step, which shows that an attempt of its run has got somewhere."""

from __future__ import annotations

import time
from typing import Any

from accelerate_nb.events.model import FirstStep
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.rank.import_hook import after_import
from accelerate_nb.rank.step_profiler import current_step_profiler
from accelerate_nb.rank_local import RankLocal

_reported: RankLocal[bool] = RankLocal(lambda: False)


def report_first_step() -> None:
    """Send the event of the first step, once a rank; called after every step."""
    if _reported.get():
        return
    _reported.set(True)
    if (listener := outlet()) is not None:
        emit(FirstStep(listener.rank, time.time()))


def install() -> None:
    """Have any optimizer of torch report its steps in this process, also where no `Accelerator` is used."""
    after_import("torch.optim.optimizer", _watch)


def _watch(module: Any) -> None:
    module.register_optimizer_step_post_hook(_on_step)


def _on_step(optimizer: Any, *_: Any) -> None:
    import torch

    # a step that is being traced is none, and to send anything would break its graph
    if not torch.compiler.is_compiling():
        report_first_step()
        current_step_profiler().stepped(optimizer)
