"""The format of safetensors, written piece by piece: its library makes a copy of everything before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

# https://huggingface.co/docs/safetensors: eight bytes with the header's length, the header as JSON, then the tensors.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_safetensors(tensors: Mapping[str, Tensor], file: Any) -> None:
    """Write tensors to an open file, as `safetensors.torch.save_file` does."""
    if any(item.dtype not in _NAMES or type(item) not in (Tensor, torch.nn.Parameter) for item in tensors.values()):
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        file.write(to_bytes(whole, metadata={"format": "pt"}))
        return
    begin, names = layout(tensors)
    file.write(begin)
    for name in names:
        write_numbers(tensors[name], file)


def layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """The header of a file of these tensors, which may be on the meta device, and the order in which they follow."""
    # wide numbers come first, so that each tensor begins at a multiple of its numbers' width
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def write_numbers(tensor: Tensor, file: Any) -> None:
    """Write a tensor's numbers to an open file."""
    if tensor.numel():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)


def can_hold(dtype: torch.dtype) -> bool:
    """Whether the format has a word for such numbers."""
    return dtype in _NAMES
