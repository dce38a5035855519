"""A model's weights without their numbers: their names, shapes and types, from code, a configuration or a checkpoint."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models.checkpoint_files import checkpoint_files, load_pickled, open_safetensors
from accelerate_nb.big_models.estimate.model_code import model_of, without_memory
from accelerate_nb.errors import CheckpointError, ConfigurationError, MissingExtraError
from accelerate_nb.runtime.checkpoints.dcp import index
from accelerate_nb.runtime.checkpoints.dcp.merge import weights_among

_PICKLED = {".bin", ".pt", ".pth", ".ckpt"}
# Under which words the weights stand in what people save with torch.save.
_WORDS = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """
    A tensor of a model: `itemsize` are the bytes of a number as it is kept now, `layer` the layer that it is in.

    One that `trains` gets a gradient. `split` is the dimension along which the model's own plan of tensor parallelism splits it, if it
    does. A checkpoint doesn't say which of its tensors are buffers; numbers that are no floating-point ones are taken for such.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: float
    is_float: bool
    trains: bool
    is_buffer: bool
    layer: str
    split: int | None = None

    @property
    def numbers(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """The tensors of a model, each once, however many names it has; `source` is where they were read from."""

    source: str
    weights: tuple[TensorInfo, ...]

    @property
    def parameters(self) -> tuple[TensorInfo, ...]:
        """The parameters, without buffers."""
        return tuple(weight for weight in self.weights if not weight.is_buffer)

    @property
    def buffers(self) -> tuple[TensorInfo, ...]:
        """The tensors that a model keeps and does not train."""
        return tuple(weight for weight in self.weights if weight.is_buffer)


def outline(source: str, arguments: Mapping[str, Any] | None = None, *, trusts: bool = False) -> ModelOutline:
    """
    The weights of a named model; none of them is read, and nothing is fetched.

    That is a folder or a file: `config.json` of transformers, safetensors, a checkpoint of torch, shards of
    torch.distributed.checkpoint. Or it is code, `path/file.py:name` or `package.module:name`, of which the name is a module
    or is called with `arguments` to make one. With `trusts`, code beside a configuration is run.

    >>> outline("torch.nn:Linear", {"in_features": 3, "out_features": 2}).parameters[0].shape
    (2, 3)
    """
    path = Path(source).expanduser()
    if path.exists():
        return _of_path(path, arguments, trusts=trusts)
    location, colon, name = source.rpartition(":")
    if colon and location:
        return _of_code(location, name, arguments or {})
    raise ConfigurationError(
        f"{source} is no file or folder, and nothing is downloaded. Download it first (`hf download {source} config.json "
        "--local-dir model`) and pass the folder, or name code as path/file.py:name or package.module:name."
    )


def of_module(model: Module, source: str) -> ModelOutline:
    """The weights of a module."""
    no_split: Any = getattr(model, "_no_split_modules", None) or []
    layers, splits = dict(_layers(model, "", no_split)), _splits(model)
    parameters = [(name, parameter, parameter.requires_grad, False) for name, parameter in model.named_parameters()]
    buffers = [(name, buffer, False, True) for name, buffer in model.named_buffers()]
    return ModelOutline(
        source,
        tuple(
            replace(
                _weight(name, parameter, layers.get(name, name), trains=trains, is_buffer=is_buffer),
                split=splits.get(name),
            )
            for name, parameter, trains, is_buffer in (*parameters, *buffers)
        ),
    )


def _splits(model: Module) -> dict[str, int]:
    """The dimensions along which the model's own plan splits its weights, by their names; shared weights stay whole."""
    if not getattr(model, "tp_plan", None):
        return {}
    # not before it is used: it loads what trains
    from accelerate_nb.runtime.strategies.tensor_parallel.split_layers import split_dimensions

    return split_dimensions(model)


def _layers(module: Module, path: str, no_split: Collection[str]) -> Iterator[tuple[str, str]]:
    """Each tensor's name with its layer: a module without children, or one of a class that must not be split."""
    children = list(module.named_children())
    if path and (not children or type(module).__name__ in no_split):
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            yield f"{path}.{name}", path
        return
    for name, child in children:
        yield from _layers(child, f"{path}.{name}" if path else name, no_split)


def _weight(name: str, tensor: Tensor, layer: str, *, trains: bool, is_buffer: bool) -> TensorInfo:
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return TensorInfo(name, tuple(tensor.shape), tensor.element_size(), is_float, trains and is_float, is_buffer, layer)


# -------------------------------------------------------------------------------------------------- files and folders


def _of_path(path: Path, arguments: Mapping[str, Any] | None, *, trusts: bool) -> ModelOutline:
    if path.suffix == ".py":
        return _of_code(str(path), "", arguments or {})
    if path.suffix == ".ipynb":
        raise ConfigurationError(
            f"{path} is a notebook. Write it as a script with `accelerate-nb export {path}`, and name the model in that: "
            f"{path.with_suffix('.py')}:name."
        )
    if path.is_dir():
        return _of_folder(path, trusts=trusts)
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return _of_configuration(path, trusts=trusts)
    if path.suffix in {".safetensors", ".json"}:
        return _of_files(checkpoint_files(path), str(path))
    if path.suffix in _PICKLED:
        return _of_files([path], str(path))
    raise ConfigurationError(
        f"{path} is no file of weights that is known by its name. Known are .safetensors, {', '.join(sorted(_PICKLED))}, "
        "the index of several files (.index.json), config.json of transformers, and Python files."
    )


def _of_folder(folder: Path, *, trusts: bool) -> ModelOutline:
    if (folder / index.LIST).is_file() or any(folder.glob(f"{index.MODEL_FOLDER}_*/{index.LIST}")):
        return _of_shards(folder)
    configuration = folder / "config.json"
    if configuration.is_file() and (
        importlib.util.find_spec("transformers")
        or not any(path.suffix in {".safetensors", ".bin"} for path in folder.iterdir())
    ):
        return _of_configuration(configuration, trusts=trusts)
    return _of_files(checkpoint_files(folder), str(folder))


def _of_files(files: Iterable[Path], source: str) -> ModelOutline:
    found: list[TensorInfo] = []
    for path in files:
        found += _in_safetensors(path) if path.suffix == ".safetensors" else _in_pickle(path)
    return ModelOutline(source, tuple(found))


def _stored(name: str, shape: Iterable[int], itemsize: float, *, is_float: bool) -> TensorInfo:
    return TensorInfo(name, tuple(shape), itemsize, is_float, is_float, not is_float, name.rpartition(".")[0] or name)


def _in_safetensors(path: Path) -> list[TensorInfo]:
    """The header of a safetensors file."""
    with open_safetensors(path) as file:
        parts = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - no mapping
        return [_from_word(name, part.get_shape(), part.get_dtype()) for name, part in parts]


def _from_word(name: str, shape: Iterable[int], word: str) -> TensorInfo:
    """A tensor whose type is a word of the format's, such as BF16, F8_E4M3 or BOOL."""
    bits = re.search(r"\d+", word)
    return _stored(name, shape, int(bits[0]) / 8 if bits else 1, is_float=word[0] in "FBC" and word != "BOOL")


def _in_pickle(path: Path) -> list[TensorInfo]:
    seen: set[tuple[Any, ...]] = set()
    found = []
    for name, tensor in _state_in(load_pickled(path), path).items():
        # names of one memory are one weight
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if memory not in seen or not tensor.numel():
            seen.add(memory)
            is_float = tensor.is_floating_point() or tensor.is_complex()
            found.append(_stored(name, tensor.shape, tensor.element_size(), is_float=is_float))
    return found


def _state_in(content: Any, path: Path) -> dict[str, Tensor]:
    """The weights in what was saved: all of it, or what stands under one of the usual words."""
    states = [content, *(content.get(word) for word in _WORDS)] if isinstance(content, Mapping) else []
    for state in states:
        items = state.items() if isinstance(state, Mapping) else ()
        if tensors := {str(name): item for name, item in items if isinstance(item, Tensor)}:
            return tensors
    held = f"a mapping of {list(content)[:5]}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
    raise CheckpointError(
        f"{path} should hold weights by their names, on top or under one of {', '.join(_WORDS)}, but holds {held}. "
        "Save `model.state_dict()`."
    )


def _of_shards(folder: Path) -> ModelOutline:
    listed = index.list_shards(folder)
    prefix, _ = weights_among(listed.positions)
    return ModelOutline(
        str(listed.folder),
        tuple(
            _stored(
                ".".join(map(str, position[len(prefix) :])),
                tensor.shape,
                tensor.element_size(),
                is_float=tensor.is_floating_point(),
            )
            for key, tensor in listed.tensors.items()
            if (position := listed.positions[key])[: len(prefix)] == prefix
        ),
    )


def _of_configuration(path: Path, *, trusts: bool) -> ModelOutline:
    """The model that a configuration of transformers describes, made without memory."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(f"{path} describes a model of transformers: pip install transformers")
    transformers: Any = import_module("transformers")
    try:
        configuration = transformers.AutoConfig.from_pretrained(
            str(path if path.name != "config.json" else path.parent), local_files_only=True, trust_remote_code=trusts
        )
        model = without_memory(lambda: _maker(transformers, configuration, trusts=trusts)(configuration), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigurationError(
            f"{path} should describe a model that transformers {transformers.__version__} can make, but: {reason} "
            "Code that lies beside it is run only with --trust_remote_code."
        ) from None
    return of_module(model, f"{type(model).__name__} as {path} describes it")


def _maker(transformers: Any, configuration: Any, *, trusts: bool) -> Callable[[Any], Any]:
    """The function that makes a model of its configuration: the class that this names, or the one without a head."""
    class_map = (getattr(configuration, "auto_map", None) or {}) if trusts else {}
    classes = [class_name for class_name in class_map if class_name.startswith("AutoModel")]
    if classes:
        class_name = next((item for item in classes if item != "AutoModel"), "AutoModel")
        return partial(getattr(transformers, class_name).from_config, trust_remote_code=True)
    for name in getattr(configuration, "architectures", None) or []:
        if (found := getattr(transformers, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    return transformers.AutoModel.from_config  # type: ignore[no-any-return]


def _of_code(location: str, name: str, arguments: Mapping[str, Any]) -> ModelOutline:
    source = f"{location}:{name}".rstrip(":")
    made = without_memory(lambda: model_of(location, name, arguments), source)
    if not isinstance(made, Module):
        raise ConfigurationError(
            f"{source} should be or give a torch.nn.Module, but is a {type(made).__name__}. Name what gives the model."
        )
    return of_module(made, source)
