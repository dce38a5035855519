"""Models that take turns on one device: each comes when it is called, and goes when the next one is."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from accelerate_nb.big_models.devices import Device, as_device, best_device, check_device_same
from accelerate_nb.big_models.hooks.base import ModelHook, add_hook_to_module, not_compiled, remove_hook_from_module
from accelerate_nb.runtime.operations.nested import send_to_device
from accelerate_nb.runtime.training.memory import clear_device_cache


class CpuOffload(ModelHook):
    """
    Keeps a model on the CPU until it is called; it stays on `execution_device` afterwards.

    The first accelerator is the default. Before its first forward, the model of `prev_module_hook` goes to the CPU.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = best_device() if execution_device is None else execution_device
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: Module) -> Module:
        return module.to("cpu")

    @not_compiled
    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None and _device_of(self.prev_module_hook.model).type != "cpu":
            self.prev_module_hook.offload()
            clear_device_cache()
        device = as_device(self.execution_device)
        if check_device_same(_device_of(module), device):
            return args, kwargs
        module.to(device)
        moved: dict[str, Any] = send_to_device(kwargs, device)
        return send_to_device(args, device), moved


class UserCpuOffloadHook:
    """A model with its hook, to send it to the CPU, or to take the hook off."""

    def __init__(self, model: Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model to the CPU until it is called again."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[Module, UserCpuOffloadHook]:
    """
    Keep a model on the CPU until it is called; it then stays on the device until the hook that is returned sends it back.

    Models in a chain take turns: each gets the hook of the one before it, whose model goes when this one is called.

    >>> encoder, first = cpu_offload_with_hook(encoder)
    >>> decoder, second = cpu_offload_with_hook(decoder, prev_module_hook=first)
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _device_of(model: Module) -> Any:
    return next(model.parameters()).device
