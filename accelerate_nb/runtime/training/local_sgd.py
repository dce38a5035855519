"""Local SGD: each process steps by itself, and the copies are averaged every few steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Module

from accelerate_nb.errors import NotYetError
from accelerate_nb.runtime.operations import collective


class LocalSGD:
    """
    A block in which each process trains its own copy of `model`; every `local_sgd_steps` steps the copies are averaged.

    They are averaged at the block's end, too. With one process, or `enabled=False`, nothing changes. See Stich, "Local SGD
    Converges Fast and Communicates Little", ICLR 2019.

    >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:  # doctest: +SKIP
    ...     for inputs, targets in loader:
    ...         accelerator.backward(loss_function(model(inputs), targets))
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         local_sgd.step()
    """

    def __init__(self, accelerator: Any, model: Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if enabled and not accelerator.strategy.copies_are_whole:
            raise NotYetError(
                f"LocalSGD was requested with {accelerator.distributed_type}, which has no whole copy of the model on each "
                "process to step by itself. Use data-parallel training (DDP), or pass enabled=False."
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._held: AbstractContextManager[Any] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._held = self.accelerator.no_sync(self.model)
            self._held.__enter__()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: Any) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        held.__exit__(error_type, *error)
        if error_type is None:  # after an error the others may never come to average with this process
            self._average()

    def step(self) -> None:
        """Say that a step was made; every `local_sgd_steps` of them the copies are averaged, which all processes must come to."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        parameters = list(self.model.parameters())
        means = collective.reduce([parameter.detach() for parameter in parameters], "mean")
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.copy_(mean)
