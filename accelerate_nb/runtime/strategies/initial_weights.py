"""The weights that a training begins with, brought from the first process to all, a part of the model at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.world.world import World


class InitialWeights:
    """
    The first process's weights and buffers, on every process's device.

    Only what was brought and is not sharded yet is in memory there: where the other processes have a model on the meta device,
    none of them ever holds it whole. What the first process has on the meta device is initialised there, by `initialise`, which
    gets a module, or by the module's `reset_parameters`.
    """

    def __init__(
        self, world: World, initialise: Callable[[Module], object] | None = None, ignored: Iterable[Parameter] = ()
    ) -> None:
        self.world, self.initialise = world, initialise
        # those that stay whole, as they are now
        self.ignored: set[Parameter] = set()
        self._ignored = {id(weight) for weight in ignored}
        self._modules: set[int] = set()

    def bring(self, module: Module) -> None:
        """
        Replace the weights and buffers of a module and its parts by the first process's; each part once.

        Weights that are tied are brought by one call, and nothing of it is kept for the next.
        """
        brought: dict[Parameter, Parameter] = {}
        for part in module.modules():
            if id(part) not in self._modules:
                self._modules.add(id(part))
                self._bring_own(part, brought)

    def _bring_own(self, part: Module, brought: dict[Parameter, Parameter]) -> None:
        # what is in parts was loaded so
        former = {
            name: weight
            for name, weight in part._parameters.items()
            if weight is not None and not isinstance(weight, DTensor)
        }
        if self.world.is_main:
            self._initialise(part, brought)
        for name, weight in former.items():
            if weight not in brought:
                current = part._parameters[name]
                assert current is not None, "initialising a module gives its weights numbers"
                brought[weight] = Parameter(self._tensor(current.detach()), weight.requires_grad)
            part._parameters[name] = brought[weight]
            if id(weight) in self._ignored:
                self.ignored.add(brought[weight])
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = self._tensor(buffer)

    def _tensor(self, tensor: Tensor) -> Tensor:
        device = self.world.device
        if self.world.is_main:
            brought = tensor.to(device).contiguous()
        else:
            brought = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if self.world.size > 1:
            dist.broadcast(brought, 0)
        return brought

    def _initialise(self, part: Module, brought: dict[Parameter, Parameter]) -> None:
        """Give numbers to what is on the meta device here, too; a tied weight has them already where another module has it."""
        device = self.world.device
        weights = {
            name: Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
            for name, weight in part._parameters.items()
            if weight is not None and weight.is_meta and weight not in brought
        }
        buffers = {
            name: torch.empty_like(buffer, device=device)
            for name, buffer in part._buffers.items()
            if buffer is not None and buffer.is_meta
        }
        if not weights and not buffers:
            return
        part._parameters.update(weights)
        part._buffers.update(buffers)
        initialise = self.initialise or getattr(type(part), "reset_parameters", None)
        if initialise is None:
            raise ConfigurationError(
                f"A {type(part).__name__} of the model is on the meta device on the first process, too, and has no "
                "`reset_parameters`. Make the model on the CPU there, or pass `param_init_fn=` to the plugin."
            )
        with torch.no_grad():
            initialise(part)
