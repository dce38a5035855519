"""The compression of gradients while they travel between copies of a model."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accelerate_nb.errors import ConfigurationError

_HOOKS = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "power_sgd": powerSGD_hook.powerSGD_hook,
    "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS = {"fp16": default_hooks.fp16_compress_wrapper, "bf16": default_hooks.bf16_compress_wrapper}


def pack_gradients(model: DistributedDataParallel, hook_name: str, wrapper: str, state_options: dict[str, Any]) -> None:
    """Let the copies exchange their gradients in 16 bits or as low-rank factors (PowerSGD); `"no"` leaves them as they are."""
    _check("comm_hook", hook_name, _HOOKS)
    _check("comm_wrapper", wrapper, _WRAPPERS)
    if hook_name == "no":
        return
    hook: Any = _HOOKS[hook_name]
    if wrapper != "no":
        hook = _WRAPPERS[wrapper](hook)
    state = powerSGD_hook.PowerSGDState(None, **state_options) if hook_name.endswith("sgd") else None
    model.register_comm_hook(state=state, hook=hook)


def _check(name: str, requested: str, known: dict[str, Any]) -> None:
    if requested != "no" and requested not in known:
        raise ConfigurationError(
            f"{name}={requested!r} is not known. Choose one of 'no', {', '.join(map(repr, known))}."
        )
