"""Names of Accelerate that are not offered: they have its parameters, and raise `NotYetError`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from torch.nn import Module

from accelerate_nb.errors import NotYetError

F = TypeVar("F", bound=Callable[..., Any])


def _unsupported(part: str, instead: str) -> Callable[[F], F]:
    """A decorator: a function that has nothing but a signature raises, and says what to do instead."""

    def decorated(function: F) -> F:
        message = f"{function.__qualname__} needs {part}, which is not offered here yet. {instead}"

        @functools.wraps(function)
        def refusing(*_: Any, **__: Any) -> NoReturn:
            raise NotYetError(message)

        refusing.__doc__ = f"Raise `NotYetError`: {message}"
        return cast("F", refusing)

    return decorated


_fsdp1 = _unsupported("FSDP's first version", "Leave it out: its second version keeps tied weights.")
_other_model = _unsupported(
    "a model of transformers in Megatron that is neither GPT-2 nor Llama",
    "Build the model of megatron-core and pass strategy='megatron', or train this one with strategy='fsdp'.",
)
_traced = _unsupported("a traced pipeline", "Use `prepare_pippy`, which splits a model without tracing it.")

_quantized = _unsupported(
    "bitsandbytes",
    "Let transformers load the model: `from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_8bit=True))`.",
)


@_quantized
def load_and_quantize_model(
    model: Module,
    bnb_quantization_config: Any,
    weights_location: Any = None,
    device_map: Any = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: Any = None,
    offload_folder: Any = None,
    offload_state_dict: bool = False,
) -> Any: ...


@_fsdp1
def ensure_weights_retied(param_init_fn: Callable[[Module], None], model: Module, device: Any) -> Any: ...


@_other_model
def parse_glm4_moe_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> Any: ...


@_other_model
def parse_bert_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> Any: ...


@_other_model
def parse_t5_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> Any: ...


@_other_model
def add_model_config_to_megatron_parser(model_type: str) -> Any: ...


class BertTrainStep:
    """The step of a BERT in Megatron, which can't be made."""

    @_other_model
    def __init__(self, accelerator: Any, args: Any) -> None: ...


class T5TrainStep:
    """The step of a T5 in Megatron, which can't be made."""

    @_other_model
    def __init__(self, accelerator: Any, args: Any) -> None: ...


@_traced
def build_pipeline(
    model: Module, split_points: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], num_chunks: int
) -> Any: ...


@_traced
def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any: ...
