"""Weights in shards, as torch.distributed.checkpoint writes them: listed, read without running code of theirs, and merged."""

import dataclasses
import enum
import io
import os
import pickle
import shutil
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import file_names, writer
from accelerate_nb.runtime.world.state import PartialState
from accelerate_nb.user_warnings import warn_user

LIST = ".metadata"
MODEL_FOLDER = file_names.SHARDED_MODEL_NAME

# Where in the saved object a value stood: `("model", "layer.weight")`.
Position = tuple[str | int, ...]
# So many bytes of weights are in memory at a time; a larger tensor is alone.
_AT_ONCE = 256 << 20


@dataclass(frozen=True)
class ShardIndex:
    """The content of a folder of shards, by the keys of its list."""

    folder: Path
    metadata: Any

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, whole, without memory for its numbers."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        return {
            key: torch.empty(item.size, dtype=item.properties.dtype, device="meta")
            for key, item in self.metadata.state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
        }

    @cached_property
    def positions(self) -> dict[str, Position]:
        """The position of each value in the saved object."""
        kept: Mapping[str, Position] = self.metadata.planner_data or {}
        return {key: tuple(kept.get(key, (key,))) for key in self.metadata.state_dict_metadata}

    @cached_property
    def files(self) -> dict[Path, int]:
        """The files that hold the shards, with how many bytes each has at least."""
        found: dict[Path, int] = {}
        for part in self.metadata.storage_data.values():
            path = self.folder / part.relative_path
            found[path] = max(found.get(path, 0), part.offset + part.length)
        return found

    def load(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of these keys, each put together from its shards in the CPU's memory."""
        wanted: dict[str, Any] = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype)
            if (tensor := self.tensors.get(key)) is not None
            else None
            for key in keys
        }
        self.load_into(wanted, flatten=False)
        return wanted

    def load_into(self, state: dict[str, Any], *, flatten: bool = True) -> None:
        """Replace the values of a state by those of the shards; of a DTensor this process's part is read, each process for itself."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        reader: Any = dcp.FileSystemReader(self.folder)
        # the list is known already
        reader.read_metadata = lambda *_, **__: self.metadata

        class ShardPlanner(DefaultLoadPlanner):
            """Reads what is no tensor without running code that it holds."""

            def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
                plain = torch.load(value, weights_only=True)  # raises where it is no plain data
                if flatten:
                    value.seek(0)
                    super().load_bytes(read_item, value)
                else:
                    self.original_state_dict[read_item.dest_index.fqn] = plain

        try:
            with warnings.catch_warnings():
                # it states one process, which is right
                warnings.simplefilter("ignore", UserWarning)
                planner = ShardPlanner(flatten_state_dict=flatten)
                dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            if not isinstance(first, Exception):
                raise first from None  # an interrupt, which torch wraps too
            text = _first_line(first)
            if text.startswith(("Missing key", "Size mismatch")):
                why = f"does not fit: {text}. Prepare the same objects as when the checkpoint was saved."
            else:
                why = f"holds damaged shards, or objects that could run code: {text}. Take another checkpoint."
            raise CheckpointError(f"{self.folder} {why}") from None


def find(checkpoint: str | os.PathLike[str]) -> Path:
    """The folder of shards that a path means: the path itself, or the one folder of a model's shards inside a checkpoint."""
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        found = "a file" if folder.exists() else "not there"
        raise ConfigurationError(
            f"{folder} should be a folder with the shards of a checkpoint, but is {found}. Correct the path."
        )
    if (folder / LIST).is_file():
        return folder
    inside = sorted(path for path in folder.glob(f"{MODEL_FOLDER}_*") if (path / LIST).is_file())
    if len(inside) == 1:
        return inside[0]
    if inside:
        raise ConfigurationError(
            f"{folder} holds the shards of several models: {', '.join(item.name for item in inside)}. "
            "Pass the path of one of them."
        )
    raise ConfigurationError(f"{folder} should hold {LIST}, the list of a checkpoint's shards. {_instead(folder)}")


def list_shards(checkpoint: str | os.PathLike[str]) -> ShardIndex:
    """The content of a checkpoint, once every file that it names is found; no weights are read."""
    folder = find(checkpoint)
    shards = ShardIndex(folder, _read_list(folder / LIST))
    absent = [path.name for path in shards.files if not path.is_file()]
    if absent:
        raise CheckpointError(
            f"{folder / LIST} names shards that are not beside it: {', '.join(sorted(absent))}. "
            "Copy them from the machines that wrote them, or take another checkpoint."
        )
    cut = [path.name for path, size in shards.files.items() if path.stat().st_size < size]
    if cut:
        raise CheckpointError(
            f"{folder} holds shards that end too early: {', '.join(sorted(cut))}. Copy them again, or take another checkpoint."
        )
    return shards


def _instead(folder: Path) -> str:
    """A description of a folder that is no list of shards, and what to do."""
    held = sorted(path.name for path in folder.iterdir())
    if any(name.endswith(".distcp") for name in held):
        return "Shards are there without it: the save has not come to its end. Take another checkpoint."
    optimizers = [name for name in held if (folder / name / LIST).is_file()]
    if optimizers:
        return f"Its folders {', '.join(optimizers)} do: pass the path of one of them."
    if any(name.startswith(f"{MODEL_FOLDER}_rank") for name in held):
        return "It holds LOCAL_STATE_DICT shards, which only as many processes as wrote them can load."
    weight_files = [name for name in held if name.endswith((".safetensors", ".bin", ".pt"))]
    if weight_files:
        return f"It holds {', '.join(weight_files[:5])}: files of weights that are no shards of this kind, and need no merging."
    return f"It holds {', '.join(held[:10]) or 'nothing'}. Pass a folder that a sharded save has written."


def _read_list(path: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with path.open("rb") as file:
            metadata = _PlainUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{path} should be the list of a checkpoint's shards, but is damaged or holds what is no such list: "
            f"{_first_line(error)}. Take another checkpoint."
        ) from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise CheckpointError(
            f"{path} should be the list of a checkpoint's shards, but holds something else. Take another checkpoint."
        )
    return metadata


class _PlainUnpickler(pickle.Unpickler):
    """Reads a list of shards; the list is a pickle, and nothing in it may call what is no plain data."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        containers = (torch.Size, OrderedDict, defaultdict, set, list, dict)
        is_plain = isinstance(found, (torch.dtype, torch.layout)) or found in containers
        is_plain = is_plain or (module, name) == ("torch.serialization", "_get_layout")
        if isinstance(found, type):
            is_path = module.startswith("pathlib") and issubclass(found, os.PathLike)
            is_defined_there = (found.__module__, found.__qualname__) == (module, name)
            is_data = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
            is_of_torch = module.startswith(("torch.distributed.checkpoint.", "torch.distributed._shard."))
            is_plain = is_plain or is_path or (is_defined_there and is_data and is_of_torch)
        if not is_plain:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not data")
        return found


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The written file, the number of its tensors and bytes, and the parts that were left out."""

    path: Path
    shards: Path
    tensors: int
    bytes: int
    left_out: tuple[str, ...] = ()
    removed: bool = False


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """
    Make one file of a checkpoint's shards: `model.safetensors` in the folder `output_path`, or else `pytorch_model.bin`.

    Shards are what FSDP saves with `SHARDED_STATE_DICT`, and whatever else torch.distributed.checkpoint writes. The main
    process does it, and the others wait. The shards are removed only after the file was compared with them.

    >>> merge_fsdp_weights("checkpoint/pytorch_model_fsdp_0", "merged")
    """
    state = PartialState()
    try:
        if state.is_main_process:
            merge(checkpoint_dir, output_path, safe=safe_serialization, removes=remove_checkpoint_dir)
    finally:
        state.wait_for_everyone()


def merge(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    safe: bool = True,
    replaces: bool = True,
    removes: bool = False,
) -> MergeResult:
    """Make one file of a checkpoint's shards in the folder `output`, whole or not at all; with `removes`, delete the shards."""
    shards = list_shards(checkpoint)
    folder, name = Path(output).expanduser(), file_names.SAFE_WEIGHTS_NAME if safe else file_names.WEIGHTS_NAME
    path = folder / name
    if folder.is_file() or (not folder.is_dir() and folder.suffix in {".safetensors", ".bin", ".pt"}):
        raise ConfigurationError(
            f"The weights were to be written to {folder}, which should be a folder. Pass {folder.parent}: "
            f"the file in it is called {name}."
        )
    if path.exists() and not replaces:
        raise ConfigurationError(f"{path} is there already. Pass another folder, or have it replaced with --overwrite.")
    if removes and path.resolve() in {file.resolve() for file in (*shards.files, shards.folder / LIST)}:
        raise ConfigurationError(f"{path} is one of the shards, which were to be removed. Pass another folder.")
    keys, left_out = _safe_names(shards) if safe else ({}, ())
    size = sum(writer.size_of(tensor) for key, tensor in shards.tensors.items() if not safe or key in keys.values())
    with writer.named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise CheckpointError(
                f"{path.name} takes {size / 1e9:.2f} GB, and {path.parent} has {free / 1e9:.2f} GB left. "
                "Make space, or pass a folder on another disk."
            )
    with writer.named(path, (OSError, RuntimeError, ValueError, SafetensorError)):
        if safe:
            writer.write_file(path, lambda file: _write_safe(file, shards, keys, compares=removes))
        else:
            writer.write_file(path, lambda file: _write_pickled(file, shards, compares=removes))
    if removes:
        # without its list a checkpoint is none, so a kill in between leaves nothing that could be taken for one
        for part in (shards.folder / LIST, *shards.files):
            part.unlink()
        if left := sorted(item.name for item in shards.folder.iterdir()):
            warn_user(f"{shards.folder} stays, since other files are in it: {', '.join(left[:5])}")
        else:
            shards.folder.rmdir()
    return MergeResult(path, shards.folder, len(keys or shards.tensors), size, left_out, removes)


def _safe_names(shards: ShardIndex) -> tuple[dict[str, str], tuple[str, ...]]:
    """The name that each tensor of the weights gets, with its key among the shards; and what is beside the weights."""
    prefix, others = weights_among(shards.positions)
    keys: dict[str, str] = {}
    for key, position in shards.positions.items():
        if position[: len(prefix)] != prefix:
            continue
        tensor = shards.tensors.get(key)
        if tensor is None or tensor.dtype not in writer.DTYPE_NAMES:
            held = "what is no tensor" if tensor is None else f"numbers of type {tensor.dtype}"
            raise CheckpointError(
                f"{shards.folder} holds {held} under {key!r}, which safetensors can't hold. "
                "Write torch's own format, with safe_serialization=False or --unsafe."
            )
        keys[".".join(map(str, position[len(prefix) :]))] = key
    return keys, others


def weights_among(positions: Mapping[str, Position]) -> tuple[Position, tuple[str, ...]]:
    """The key of the weights, if there is one, and the keys beside it."""
    tops = {str(position[0]): len(position) > 1 for position in positions.values()}
    if len(tops) == 1:
        (word, is_nested) = next(iter(tops.items()))
        return ((word,) if is_nested else ()), ()
    if tops.get("model"):
        return ("model",), tuple(sorted(word for word in tops if word != "model"))
    return (), ()


def _write_safe(file: BinaryIO, shards: ShardIndex, keys: Mapping[str, str], *, compares: bool) -> None:
    # piece by piece, so that the weights need not fit in memory
    begin, names = writer.layout({name: shards.tensors[key] for name, key in keys.items()})
    file.write(begin)
    groups = list(writer.in_groups(names, lambda name: writer.size_of(shards.tensors[keys[name]]), _AT_ONCE))
    for group in groups:
        loaded = shards.load(keys[name] for name in group)
        for name in group:
            writer.write_numbers(loaded[keys[name]], file)
    file.flush()
    with safe_open(Path(file.name), framework="pt") as written:
        assert set(written.keys()) == set(keys), "the file has the names that its beginning lists"
        for group in groups if compares else ():
            loaded = shards.load(keys[name] for name in group)
            for name in group:
                _compare(name, written.get_tensor(name), loaded[keys[name]])


def _write_pickled(file: BinaryIO, shards: ShardIndex, *, compares: bool) -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

    nested: Any = unflatten_state_dict(shards.load(shards.positions), shards.positions)
    if len(nested) == 1 and isinstance(only := next(iter(nested.values())), dict):
        nested = only
    torch.save(nested, file)
    if compares:
        file.flush()
        written, _ = flatten_state_dict(torch.load(Path(file.name), weights_only=True, mmap=True))
        for name, value in flatten_state_dict(nested)[0].items():
            _compare(name, written[name], value)


def _compare(name: str, written: Any, expected: Any) -> None:
    """Raise where what was written is not, bit for bit, what the shards hold."""
    if isinstance(expected, Tensor):
        bits, wanted = (item.contiguous().reshape(-1).view(torch.uint8) for item in (written, expected))
        same = written.dtype == expected.dtype and written.shape == expected.shape and torch.equal(bits, wanted)
    else:
        same = written == expected
    if not same:
        raise CheckpointError(f"{name} reads otherwise than it was written. See whether the disk is sound.")
