"""The memory that a model takes, before anything is loaded: its weights, and each rank of a mesh in training."""

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models.empty import init_empty_weights
from accelerate_nb.big_models.load_checkpoint import checkpoint_files, described, load_pickled, open_weights
from accelerate_nb.errors import CheckpointError, ConfigurationError, MissingExtraError
from accelerate_nb.runtime.checkpoints.shards import LIST, MODEL_FOLDER, list_shards, weights_among
from accelerate_nb.runtime.world.world import Mesh

Optimizer: TypeAlias = Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adam8bit"]
# float32 weights; those computed with in 16 bits; 16 bits throughout
Precision: TypeAlias = Literal["float32", "mixed", "bfloat16"]

# The bytes of one number of each type in which weights are kept to compute with them.
DTYPES: dict[str, float] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int4": 0.5}
# torch's optimizers count the steps of each weight in a float32.
_STEP = 4
# bitsandbytes keeps the states of smaller weights as float32, those of others in bytes with a float32 for each block
# (`min_8bit_size` and the block size of bitsandbytes/optim/optimizer.py, `Optimizer2State`).
_SMALL, _BLOCK = 4096, 256

_PICKLED = {".bin", ".pt", ".pth", ".ckpt"}
# Under which words the weights stand in what people save with torch.save.
_WORDS = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a model; one that `trains` gets a gradient."""

    name: str
    shape: tuple[int, ...]
    itemsize: float  # the bytes of a number as it is kept now
    is_float: bool
    trains: bool
    is_buffer: bool  # in a checkpoint, which doesn't say: numbers that are no floating-point ones
    layer: str
    split: int | None = None  # the dimension along which the model's own plan of tensor parallelism splits it

    @property
    def numbers(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def block(self) -> str:
        """The block that it is in: its name up to the first number in it; empty for what is in no block."""
        found = re.match(r"(.*?\.)?\d+(?=\.)", self.name)
        return found[0] if found else ""


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """The tensors of a model, each once, however many names it has; `source` is where they were read from."""

    source: str
    weights: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class RankBytes:
    """The bytes that a rank holds between two steps, and beside it in one; activations depend on the batch, and are left out."""

    weights: int
    gradients: int
    optimizer: int
    extra: int = 0  # what comes and goes while a step is computed

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.extra


def bytes_of(weights: Iterable[TensorInfo], itemsize: float) -> int:
    """The bytes of tensors whose floating-point numbers take so many each."""
    return math.ceil(sum(weight.numbers * (itemsize if weight.is_float else weight.itemsize) for weight in weights))


def largest_layer(outline: ModelOutline, itemsize: float) -> tuple[str, int]:
    """The layer that takes the most, and its bytes, each floating-point number taking so many."""
    layers: dict[str, list[TensorInfo]] = {}
    for weight in outline.weights:
        layers.setdefault(weight.layer, []).append(weight)
    sizes = {name: bytes_of(weights, itemsize) for name, weights in layers.items()}
    return max(sizes.items(), key=lambda item: item[1], default=("", 0))


# ------------------------------------------------------------------------------------------------------------- training


def on_mesh(outline: ModelOutline, precision: Precision, optimizer: Optimizer, mesh: Mesh) -> list[RankBytes]:
    """The memory that a rank of each stage (pp) takes for a training: layers split (tp), sharded (dp_shard and cp), or copied."""
    if mesh.tp > 1 and not any(weight.split is not None for weight in outline.weights):
        raise ConfigurationError(
            f"The memory on {mesh} was requested, but {outline.source} has no plan by which tp would split it. Name the "
            "configuration of a model of transformers that has one, or leave tp out."
        )
    return [_on_rank(stage, precision, optimizer, mesh) for stage in _stages(outline.weights, mesh.pp)]


def smallest_mesh(outline: ModelOutline, precision: Precision, optimizer: Optimizer, memory: int) -> Mesh | None:
    """The mesh of the fewest ranks (a power of two) of `memory` bytes each that a training fits on; `None` where 4,096 are too few."""
    splits = [weight.shape[weight.split] for weight in outline.weights if weight.split is not None]
    blocks = {weight.block for weight in outline.weights} - {""}
    # layers are split along their width between the devices of one machine
    tps = [tp for tp in (2, 4, 8) if splits and all(width % tp == 0 for width in splits)]
    pps = [pp for pp in (2, 4, 8) if pp <= len(blocks)]
    for size in (2**exponent for exponent in range(13)):
        # what communicates the least comes first
        meshes = [Mesh(dp_shard=size)]
        meshes += [Mesh(dp_shard=size // tp, tp=tp) for tp in tps if tp <= size]
        meshes += [Mesh(dp_shard=size // pp, pp=pp) for pp in pps if pp <= size]
        for mesh in meshes:
            stages = on_mesh(outline, precision, optimizer, mesh)
            if max(stage.total for stage in stages) <= memory * 0.8:  # a fifth is for activations
                return mesh
    return None


def _stages(weights: Sequence[TensorInfo], count: int) -> list[list[TensorInfo]]:
    """The tensors of each stage, which have about equally many numbers, as the runtime cuts them."""
    if count == 1:
        return [list(weights)]
    # not before it is used: it loads what trains
    from accelerate_nb.runtime.strategies.pipeline.staged_model import balanced

    on_all = [weight for weight in weights if weight.is_buffer and not weight.block]
    named: dict[str, list[TensorInfo]] = {}
    for weight in weights:
        if not weight.is_buffer or weight.block:
            named.setdefault(weight.block or weight.layer, []).append(weight)
    layers = list(named.values())
    if len(layers) < count:
        raise ConfigurationError(
            f"The memory on {count} stages of a pipeline was requested, but the model has {len(layers)} layers. Take fewer stages."
        )
    starts = [0, *balanced([float(sum(weight.numbers for weight in layer)) for layer in layers], count), len(layers)]
    return [on_all + [weight for layer in layers[start:end] for weight in layer] for start, end in pairwise(starts)]


def _on_rank(weights: Sequence[TensorInfo], precision: Precision, optimizer: Optimizer, mesh: Mesh) -> RankBytes:
    itemsize = 2 if precision == "bfloat16" else 4
    shards = mesh.dp_shard * mesh.cp if mesh.dp_shard > 1 else 1
    split = [weight if weight.split is None else _cut(weight, weight.split, mesh.tp) for weight in weights]
    # the first shard is the largest one; buffers are whole
    parts = [weight if weight.is_buffer or not weight.shape else _cut(weight, 0, shards) for weight in split]
    trained = [weight for weight in parts if weight.trains]
    gradients = bytes_of(trained, itemsize)
    if shards > 1:
        # FSDP has whole for a moment: what is in no block, two blocks (one is fetched ahead), and the gradient of the largest of these
        sizes: dict[str, int] = {}
        for weight in split:
            if not weight.is_buffer:
                size = bytes_of([weight], 4 if precision == "float32" else 2)
                sizes[weight.block] = sizes.get(weight.block, 0) + size
        outside = sizes.pop("", 0)
        largest = sorted(sizes.values())[-2:]
        extra = outside + sum(largest) + max([outside, *largest])
    else:
        # `torch.autocast` keeps a copy of 16 bits of each weight from its first use in the forward to the backward; DDP keeps the
        # gradients a second time, in the buckets that it sends, unless `gradient_as_bucket_view`
        copied = [weight for weight in parts if weight.is_float and not weight.is_buffer and precision == "mixed"]
        extra = bytes_of(copied, 2) + (gradients if mesh.dp_replicate * mesh.cp > 1 else 0)
    return RankBytes(
        weights=bytes_of(parts, itemsize),
        gradients=gradients,
        optimizer=sum(_optimizer_bytes(optimizer, weight, itemsize) for weight in trained),
        extra=extra,
    )


def _cut(weight: TensorInfo, dimension: int, degree: int) -> TensorInfo:
    length = math.ceil(weight.shape[dimension] / degree)
    return replace(weight, shape=(*weight.shape[:dimension], length, *weight.shape[dimension + 1 :]))


def _optimizer_bytes(optimizer: Optimizer, weight: TensorInfo, itemsize: int) -> int:
    """The bytes that an optimizer remembers of a weight whose numbers take `itemsize` bytes each."""
    moment = weight.numbers * itemsize
    match optimizer:
        case "sgd":
            return 0
        case "sgd-momentum":
            return moment  # `torch.optim.SGD` counts no steps
        case "adam" | "adamw":
            return 2 * moment + _STEP
        case "adafactor" if len(weight.shape) < 2:
            return moment + _STEP
        case "adafactor":
            # the second moment of a matrix is one row and one column
            *rest, rows, columns = weight.shape
            return math.prod(rest) * (rows + columns) * itemsize + _STEP
        case "adam8bit":
            # two moments of one byte, with a scale for each block
            is_small = weight.numbers < _SMALL
            return 2 * (weight.numbers * 4 if is_small else weight.numbers + 4 * math.ceil(weight.numbers / _BLOCK))


# ------------------------------------------------------------------------------------------------- where a model is from


def outline(source: str, arguments: Mapping[str, Any] | None = None, *, trusts: bool = False) -> ModelOutline:
    """The weights of a model in a folder, a file or code (`path/file.py:name`, `package.module:name`); none is read, or fetched."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _of_folder(path, trusts=trusts)
    location, colon, name = (source, "", "") if path.exists() else source.rpartition(":")
    if (path.suffix == ".py" and path.exists()) or (colon and location):
        return _of_code(location, name, arguments or {})
    if not path.exists():
        raise ConfigurationError(
            f"{source} is no file or folder, and nothing is downloaded. Download it first (`hf download {source} config.json "
            "--local-dir model`) and pass the folder, or name code as path/file.py:name or package.module:name."
        )
    if path.suffix == ".ipynb":
        raise ConfigurationError(
            f"{path} is a notebook. Write it as a script with `accelerate-nb export {path}`, and name the model in that: "
            f"{path.with_suffix('.py')}:name."
        )
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return _of_configuration(path, trusts=trusts)
    if path.suffix in {".safetensors", ".json", *_PICKLED}:
        return _of_files(path)
    raise ConfigurationError(
        f"{path} is no file of weights that is known by its name. Known are .safetensors, {', '.join(sorted(_PICKLED))}, "
        "the index of several files (.index.json), config.json of transformers, and Python files."
    )


def of_module(model: Module, source: str) -> ModelOutline:
    """The weights of a module; a layer is a module without children, or one of a class that must not be split."""
    no_split: Any = getattr(model, "_no_split_modules", None) or []
    modules = [(path, module) for path, module in model.named_modules() if path]
    layers = {path for path, module in modules if not list(module.children()) or type(module).__name__ in no_split}
    splits: Mapping[str, int] = {}
    if getattr(model, "tp_plan", None):
        # not before it is used: it loads what trains
        from accelerate_nb.runtime.strategies.tensor_parallel import split_dimensions

        splits = split_dimensions(model)

    def info(name: str, tensor: Tensor, *, is_buffer: bool) -> TensorInfo:
        around = accumulate(name.split("."), "{}.{}".format)
        layer = next((path for path in around if path in layers), name)
        trains = tensor.requires_grad and not is_buffer
        return replace(_stored(name, tensor), trains=trains, is_buffer=is_buffer, layer=layer, split=splits.get(name))

    parameters = (info(name, item, is_buffer=False) for name, item in model.named_parameters())
    buffers = (info(name, item, is_buffer=True) for name, item in model.named_buffers())
    return ModelOutline(source, (*parameters, *buffers))


def _of_folder(folder: Path, *, trusts: bool) -> ModelOutline:
    if (folder / LIST).is_file() or any(folder.glob(f"{MODEL_FOLDER}_*/{LIST}")):
        listed = list_shards(folder)
        prefix, _ = weights_among(listed.positions)
        weights = (
            _stored(".".join(map(str, position[len(prefix) :])), listed.tensors[key])
            for key, position in listed.positions.items()
            if key in listed.tensors and position[: len(prefix)] == prefix
        )
        return ModelOutline(str(listed.folder), tuple(weights))
    configuration = folder / "config.json"
    has_weights = any(path.suffix in {".safetensors", ".bin"} for path in folder.iterdir())
    if configuration.is_file() and (importlib.util.find_spec("transformers") or not has_weights):
        return _of_configuration(configuration, trusts=trusts)
    return _of_files(folder)


def _of_files(checkpoint: Path) -> ModelOutline:
    found: list[TensorInfo] = []
    for path in checkpoint_files(checkpoint):
        if path.suffix == ".safetensors":
            with open_weights(path) as weights:
                found += [_stored(name, tensor) for name, tensor in weights.items()]
            continue
        content: Any = load_pickled(path)
        # all of it are weights, or what stands under one of the usual words
        states = [content, *map(content.get, _WORDS)] if isinstance(content, Mapping) else []
        named = [
            {str(name): item for name, item in state.items() if isinstance(item, Tensor)}
            for state in states
            if isinstance(state, Mapping)
        ]
        if not any(named):
            raise CheckpointError(
                f"{path} should hold weights by their names, on top or under one of {', '.join(_WORDS)}, but holds "
                f"{described(content)}. Save `model.state_dict()`."
            )
        # names of one memory are one weight
        first: dict[Any, TensorInfo] = {}
        for name, tensor in next(filter(None, named)).items():
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
            first.setdefault(memory, _stored(name, tensor))
        found += first.values()
    return ModelOutline(str(checkpoint), tuple(found))


def _stored(name: str, tensor: Tensor) -> TensorInfo:
    is_float, layer = tensor.is_floating_point() or tensor.is_complex(), name.rpartition(".")[0] or name
    return TensorInfo(name, tuple(tensor.shape), tensor.element_size(), is_float, is_float, not is_float, layer)


def _without_memory(make: Callable[[], Any], source: str) -> Module:
    """The model that `make` makes, on torch's meta device."""
    needed = ""
    # a model may read numbers while it is made, those of a `linspace` for one: then all but its weights has memory
    for include_buffers in (True, False):
        try:
            with init_empty_weights(include_buffers=include_buffers):
                made = make()
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            needed = str(error).partition("\n")[0]
            continue
        if isinstance(made, Module):
            return made
        raise ConfigurationError(
            f"{source} should be or give a torch.nn.Module, but is a {type(made).__name__}. Name what gives the model."
        )
    raise ConfigurationError(
        f"{source} needs the numbers of its weights while it is made ({needed}), and they have none. Name a checkpoint of it instead."
    )


def _of_configuration(path: Path, *, trusts: bool) -> ModelOutline:
    """The model that a configuration of transformers describes: of the class that it names, or the one without a head."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(f"{path} describes a model of transformers: pip install transformers")
    transformers: Any = import_module("transformers")
    try:
        configuration = transformers.AutoConfig.from_pretrained(
            str(path if path.name != "config.json" else path.parent), local_files_only=True, trust_remote_code=trusts
        )
        maker = transformers.AutoModel.from_config
        class_map = (getattr(configuration, "auto_map", None) or {}) if trusts else {}
        if own := [class_name for class_name in class_map if class_name.startswith("AutoModel")]:
            class_name = next((item for item in own if item != "AutoModel"), "AutoModel")
            maker = partial(getattr(transformers, class_name).from_config, trust_remote_code=True)
        else:
            named = (getattr(transformers, name, None) for name in getattr(configuration, "architectures", None) or [])
            maker = next(filter(None, named), maker)
        model = _without_memory(lambda: maker(configuration), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigurationError(
            f"{path} should describe a model that transformers {transformers.__version__} can make, but: {reason} "
            "Code that lies beside it is run only with --trust_remote_code."
        ) from None
    return of_module(model, f"{type(model).__name__} as {path} describes it")


def _of_code(location: str, name: str, arguments: Mapping[str, Any]) -> ModelOutline:
    """The model that a name (or the only one) in a file or a module is, or that it returns where it is called with `arguments`."""

    def make() -> Any:
        if location.endswith(".py"):
            path = Path(location).expanduser()
            spec: Any = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            # data classes, and pickles, find their module by its name
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        else:
            module = import_module(location)
        known = [
            item
            for item, value in vars(module).items()
            if isinstance(value, Module)
            or (isinstance(value, type) and issubclass(value, Module) and value.__module__ == module.__name__)
        ]
        if not name and len(known) != 1:
            found_there = f"several models: {', '.join(known)}" if known else "no torch.nn.Module"
            raise ConfigurationError(f"{location} has {found_there}. Name what gives the model: {location}:name.")
        found: Any = module
        for part in (name or known[0]).split("."):
            if not hasattr(found, part):
                raise ConfigurationError(f"{location} has no {name}. It has {', '.join(known) or 'no modules'}.")
            found = getattr(found, part)
        if not isinstance(found, Module) and callable(found):
            return found(**arguments)
        if arguments:
            raise ConfigurationError(f"{location}:{name} is there already, and takes no arguments. Leave --args out.")
        return found

    before = list(sys.path)
    # imports find modules beside the file, or in the current folder, as with `python file.py` and `python -m`
    sys.path.insert(0, str(Path(location).resolve().parent if location.endswith(".py") else Path.cwd()))
    try:
        source = f"{location}:{name}".rstrip(":")
        return of_module(_without_memory(make, source), source)
    finally:
        sys.path[:] = before
