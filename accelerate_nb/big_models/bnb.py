"""The storage of weights of 4 and 8 bits by bitsandbytes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.dataclasses import CustomDtype
from accelerate_nb.user_warnings import warn_user

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """
    The storage of a model's weights by bitsandbytes: exactly one of `load_in_8bit` and `load_in_4bit`.

    Types are given as `"fp32"`, `"fp16"`, `"bf16"` or as torch's own.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            both = "both" if self.load_in_8bit else "neither"
            raise ConfigurationError(f"load_in_4bit and load_in_8bit are {both} set. Pass exactly one of them.")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigurationError(
                f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not known. bnb_4bit_quant_type must be in ['fp4','nf4']."
            )
        self.bnb_4bit_compute_dtype = _type("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        if self.torch_dtype is not None:
            self.torch_dtype = _type("torch_dtype", self.torch_dtype)
        for name in ("skip_modules", "keep_in_fp32_modules"):
            if not isinstance(getattr(self, name), (list, type(None))):
                raise ConfigurationError(f"{name}={getattr(self, name)!r} must be a list of strings.")
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warn_user("llm_int8_threshold can only be used for model loaded in 8bit")


def _type(name: str, value: Any) -> torch.dtype:
    found = _TYPES.get(value, value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(f"{name}={value!r} must be one of {list(_TYPES)} or a torch.dtype.")
    return found


def has_4bit_bnb_layers(model: Module) -> bool:
    """Whether a module of the model is bitsandbytes' linear layer of 4 bits."""
    bases = (base for module in model.modules() for base in type(module).__mro__)
    return any(base.__name__ == "Linear4bit" and base.__module__.startswith("bitsandbytes.") for base in bases)
