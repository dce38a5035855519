"""A function of Accelerate for FSDP's first version, which is not offered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from accelerate_nb.runtime.compat.unsupported.base import Unsupported

_unsupported = Unsupported("FSDP's first version", "Leave it out: its second version keeps tied weights.")


@_unsupported
def ensure_weights_retied(param_init_fn: Callable[[Module], None], model: Module, device: Any) -> Any: ...
