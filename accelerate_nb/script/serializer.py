"""Any value as bytes: what a script's processes send each other."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    import torch


def pack(value: Any, *, detached: bool) -> bytes:
    """
    A value as bytes, whatever functions without a name it holds.

    Definitions of the script itself are pickled by name, so that an object's class is the same class on the other side. Tensors
    that share memory share it afterwards. `detached` ones lose what autograd knows of them, and models what averages their
    gradients.
    """
    import torch

    file = io.BytesIO()
    module: Any = SimpleNamespace(__name__=__name__, Pickler=_DetachingPickler if detached else _ScriptPickler)
    torch.save(value, file, pickle_module=module, pickle_protocol=5)
    return file.getvalue()


def unpack(packed: bytes, device: torch.device) -> Any:
    """The value that was packed; tensors that were on an accelerator are on `device`."""
    import torch

    def where(storage: Any, location: str) -> Any:
        at_home = location in {"cpu", "meta"} or device.type == "cpu"
        return storage if at_home else torch.serialization.default_restore_location(storage, str(device))

    # `weights_only` is for files of strangers: this comes from a process that runs the same script
    return torch.load(io.BytesIO(packed), map_location=where, weights_only=False)


class _ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        return obj.__qualname__ if _stands_in_the_script(obj) else super().reducer_override(obj)


class _DetachingPickler(_ScriptPickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        if type(obj) is torch.Tensor and obj.requires_grad:
            return _itself, (obj.detach(),)
        if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            return _itself, (obj.module,)
        return super().reducer_override(obj)


def _stands_in_the_script(obj: Any) -> bool:
    """Whether a function or class of `__main__` can be found there under its name."""
    if getattr(obj, "__module__", None) != "__main__" or not isinstance(getattr(obj, "__qualname__", None), str):
        return False
    if not isinstance(obj, type) and not callable(obj):
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _itself(value: Any) -> Any:
    return value
