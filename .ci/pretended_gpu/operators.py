"""The operators of the pretended CUDA: each computes on the CPU, in the memory that a CUDA tensor has there."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.pretended_begin.argtypes = [ctypes.c_void_p]
_runtime.pretended_busy.argtypes = [ctypes.c_void_p, ctypes.c_double]
_CLOCK = 1.98e9  # cycles a second, of `torch.cuda._sleep`

# torch's own code does these through the runtime: it allocates, views and copies.
_OF_TORCH = frozenset(
    [
        "empty.memory_format",
        "empty_strided",
        "as_strided",
        "view",
        "_reshape_alias",
        "_local_scalar_dense",
        "resize_",
        "record_stream",
        "_pin_memory",
        "is_pinned",
        "unfold",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "is_set_to",
        "view_as_complex",
        "_copy_from",
        "_copy_from_and_resize",
        "_efficientzerotensor",
        "_unsafe_view",
        "is_same_size",
        "detach",
        "equal_",
    ]
)
_LEFT_OUT = ("sparse", "quantize", "fake_quant")
# These take a tensor of the CPU beside one of a GPU: indices, scalars, the state of an optimizer.
_MIXED = (
    "index",
    "where",
    "pad",
    "_foreach",
    "fused",
    "lstm",
    "repeat_interleave",
    "histc",
    "copy",
    "_amp",
    "embedding_bag",
)

_lock = threading.RLock()
_libraries: list[Any] = []
# What the operators of each capture did, to be done again when its graph is launched.
_captured: dict[int, list[Callable[[], None]]] = {}


def on_cpu(tensor: Tensor) -> Tensor:
    """A tensor of the CPU with the memory of one of a GPU."""
    if tensor.numel() == 0 or not tensor.untyped_storage().nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    found = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def on_gpu(tensor: Tensor, device: torch.device) -> Tensor:
    """A new tensor of a GPU with the numbers of one of the CPU."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        on_cpu(made).copy_(tensor)
    return made


class Operator:
    """An operator that computes on the CPU what it was given of a GPU."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        arguments = operator._schema.arguments
        self._takes_device = any(argument.name == "device" for argument in arguments)
        self._takes_generator = any(argument.name == "generator" for argument in arguments)
        self._is_random = torch.Tag.nondeterministic_seeded in operator.tags or self._takes_generator
        self._takes_both = any(part in str(operator) for part in _MIXED)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = self._device(args, kwargs)
        with torch.cuda.device(device), torch._C._AutoDispatchBelowAutograd():
            capture = _runtime.pretended_begin(torch.cuda.current_stream(device).cuda_stream)
            given: dict[int, tuple[Tensor, Tensor]] = {}
            args, kwargs = pytree.tree_map(lambda value: self._to_cpu(value, device, given), (args, kwargs))
            found = self._compute(device, args, kwargs)
            for tensor, local in given.values():
                if tensor.shape != local.shape:
                    tensor.resize_(local.shape)
                    if local.numel():
                        on_cpu(tensor).copy_(local)
            results = pytree.tree_map(lambda value: _to_gpu(value, device, given), found)
            if capture:
                _captured.setdefault(capture, []).append(lambda: self._again(device, args, kwargs, results))
        return results

    def _device(self, args: Any, kwargs: dict[str, Any]) -> torch.device:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.device.type == "cuda":
                return value.device
        named = torch.device(kwargs.get("device") or "cuda")
        return torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)

    def _to_cpu(self, value: Any, device: torch.device, given: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        is_elsewhere = value.device != device if value.device.type == "cuda" else not self._takes_both
        if is_elsewhere and value.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {device} and {value.device}! "
                f"(when checking argument in method {self._operator})"
            )
        if value.device.type != "cuda":
            return value
        local = on_cpu(value)
        given[id(local)] = value, local
        return local

    def _compute(self, device: torch.device, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._is_random:
            return self._operator(*args, **kwargs)
        # numbers that follow from the GPU's seed and from how often it was asked, as a GPU's do; not the CPU's own
        named = [*pytree.tree_leaves((args, kwargs), is_leaf=lambda value: isinstance(value, torch.Generator))]
        own = next((value for value in named if isinstance(value, torch.Generator)), None)
        own = own or torch.cuda.default_generators[device.index]
        drawn = torch.Generator().manual_seed((own.initial_seed() * 1000003 + own.get_offset()) % (1 << 63))
        own.set_offset(own.get_offset() + 4)
        if self._takes_generator:
            args = tuple(drawn if isinstance(value, torch.Generator) else value for value in args)
            return self._operator(*args, **{**kwargs, "generator": drawn})
        with _lock:
            state = torch.default_generator.get_state()
            torch.default_generator.set_state(drawn.get_state())
            try:
                return self._operator(*args, **kwargs)
            finally:
                torch.default_generator.set_state(state)

    def _again(self, device: torch.device, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        again = self._compute(device, args, kwargs)
        for kept, found in zip(pytree.tree_leaves(results), pytree.tree_leaves(again), strict=True):
            if isinstance(kept, Tensor) and kept.numel():
                on_cpu(kept).copy_(found)


def _to_gpu(value: Any, device: torch.device, given: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """A result: what was given itself, a view of it, or a new tensor."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    if id(value) in given:
        return given[id(value)][0]
    for tensor, local in given.values():
        if value.numel() and value.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
            if value.dtype == tensor.dtype:
                return torch.as_strided(tensor, value.size(), value.stride(), value.storage_offset())
            break
    return on_gpu(value, device)


def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy within a GPU, or through torch's own code from or to it."""
    if self.device.type == source.device.type == "cuda":
        with torch.cuda.device(self.device):
            for device in {self.device, source.device}:
                capture = _runtime.pretended_begin(torch.cuda.current_stream(device).cuda_stream)
            on_cpu(self).copy_(on_cpu(source))
        if capture:
            _captured.setdefault(capture, []).append(lambda: on_cpu(self).copy_(on_cpu(source)) and None)
        return self
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    torch.ops.aten.copy_.default.redispatch(keys, self, source, non_blocking)
    return self


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _launch(graph: int) -> None:
    for do_again in _captured.get(graph, ()):
        do_again()


def _sleep(cycles: int) -> None:
    _runtime.pretended_busy(torch.cuda.current_stream().cuda_stream, cycles / _CLOCK)


def install() -> int:
    """Register every operator that CUDA and the CPU have for CUDA anew; returns how many."""
    warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered kernel.*")
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    count = 0
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        if name == full or name in _OF_TORCH or any(part in name for part in _LEFT_OUT):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA"):
            continue
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, "CPU"):
            continue
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        # views are torch's own
        if any(item.alias_info is not None and not item.alias_info.is_write for item in operator._schema.returns):
            continue
        library.impl(name, Operator(operator), "CUDA", allow_override=True)
        count += 1
    library.impl("copy_", copy_, "CUDA", allow_override=True)
    # attention by torch's own formula; the others are kernels
    torch._C._set_sdp_use_flash(False)
    torch._C._set_sdp_use_mem_efficient(False)
    torch._C._set_sdp_use_cudnn(False)
    torch.cuda._sleep = _sleep
    _runtime.pretended_on_graph(_launch)
    return count


install()
