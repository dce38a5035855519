"""Checkpoints of weights, found, read without running code that they hold, and loaded into a model by a device map."""

import json
import logging
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models import tensors
from accelerate_nb.big_models.device_map import (
    check_devices,
    check_tied_parameters_on_same_device,
    covering,
    device_of,
    find_tied_parameters,
    infer_auto_device_map,
    retie_parameters,
    warn_if_untied,
)
from accelerate_nb.big_models.dispatch import dispatch_model
from accelerate_nb.big_models.memory import Memory, get_balanced_memory
from accelerate_nb.big_models.offload import Folder, forget, load_offloaded_weight, offload_weight, save_offload_index
from accelerate_nb.errors import CheckpointError, ConfigurationError, NotYetError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.training.repoint import original_name

_INDEXES = (file_names.SAFE_WEIGHTS_INDEX_NAME, file_names.WEIGHTS_INDEX_NAME)
_WHOLE = (file_names.SAFE_WEIGHTS_NAME, file_names.WEIGHTS_NAME)
# So many files of a folder without weights are named in an error.
_MOST_NAMES = 10

logger = logging.getLogger("accelerate_nb.utils.modeling")
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def checkpoint_files(checkpoint: Folder) -> list[Path]:
    """The files of a checkpoint: a file of weights, those of an index, or those of the newest checkpoint in a folder."""
    path = Path(checkpoint)
    if path.is_file():
        return _listed_in(path) if path.suffix == ".json" else [path]
    if not path.is_dir():
        raise ConfigurationError(
            "`checkpoint` should be the path to a file containing a whole state dict, or the index of a sharded checkpoint, "
            f"or a folder containing a sharded checkpoint or the whole state dict, but got {checkpoint}, which is not there."
        )
    held = sorted(path.iterdir())
    whole = [path / name for name in _WHOLE if (path / name).is_file()]
    indexes = [item for item in held if item.name.endswith(".index.json")]
    has_strange = any(index.name not in _INDEXES for index in indexes)
    if len(indexes) > 1 and has_strange and not whole:
        raise ConfigurationError(
            f"{path} containing more than one `.index.json` file, the choice is ambiguous: "
            f"{', '.join(index.name for index in indexes)}. Pass the path of one of them, or delete the irrelevant ones."
        )
    found = whole + ([] if whole and has_strange else indexes)
    if not found:
        names = [item.name for item in held]
        if len(names) > _MOST_NAMES:
            names[_MOST_NAMES:] = [f"{len(names) - _MOST_NAMES} more"]
        raise ConfigurationError(
            f"{path} is not a folder containing a `.index.json` file or a {file_names.WEIGHTS_NAME} or a "
            f"{file_names.SAFE_WEIGHTS_NAME} file. It holds: {', '.join(names) or 'nothing'}."
        )
    # a file that a former save left behind is older; of equally old ones the first: safetensors
    chosen = max(found, key=lambda item: item.stat().st_mtime_ns)
    return _listed_in(chosen) if chosen.suffix == ".json" else [chosen]


def _listed_in(index: Path) -> list[Path]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))
        weight_map: dict[str, str] = listed.get("weight_map", listed)
        files = sorted({index.parent / file for file in weight_map.values()})
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} should be an index, JSON with a `weight_map` from names to files, but is damaged or another file: "
            f"{error}. Save or download it again."
        ) from None
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names files that are not beside it: {', '.join(absent)}. Save or download the checkpoint again."
        )
    return files


@contextmanager
def open_weights(path: Path) -> Iterator[Mapping[str, Any]]:
    """The weights in a file by name, read on use: they are the file's memory, so keep copies."""
    if path.suffix != ".safetensors":
        content = load_pickled(path)
        if not isinstance(content, Mapping) or not any(isinstance(item, Tensor) for item in content.values()):
            raise CheckpointError(
                f"{path} should hold a state dict, names with tensors, but holds {described(content)}. "
                "Save `model.state_dict()` itself."
            )
        yield content
        return
    try:
        opened = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} should be a safetensors file, but is damaged, or another kind of file: {error}. "
            "Save or download it again."
        ) from None
    with opened as file:
        found = (file.metadata() or {}).get("format", "pt")
        if found != "pt":
            raise CheckpointError(
                f"{path} was saved with the format {found!r} of another framework, and weights of torch, 'pt', are expected. "
                "Save it with torch, or convert it."
            )
        yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def load_pickled(path: Path) -> Any:
    """The content of a file that torch.save wrote, read into memory on use; `CheckpointError` where it is damaged or no data."""
    try:
        # only the format of today can be mapped; that of torch 1.5 is no zip file
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path) or None)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} should hold a state dict written by torch.save, but is damaged, or holds objects other than tensors, "
            f"which are not read since they could run code: {str(error).splitlines()[0] if str(error) else 'it is empty'}. "
            "Save it again from `model.state_dict()`, or download it again."
        ) from None


def described(content: Any) -> str:
    """What a file holds in place of weights, in the words of an error."""
    return f"a mapping of {list(content)[:5]}" if isinstance(content, Mapping) else f"a {type(content).__name__}"


def load_state_dict(checkpoint_file: Folder, device_map: tensors.DeviceMap | None = None) -> dict[str, Any]:
    """
    The tensors of one file of weights, of safetensors or of torch.save; each on the device that `device_map` has for it.

    What the map leaves out, or has on disk, is on the CPU. No code in the file is run.
    """
    state: dict[str, Any] = {}
    with open_weights(Path(checkpoint_file)) as weights:
        for name, item in weights.items():
            if not isinstance(item, Tensor):
                state[name] = item
                continue
            found = covering(name, device_map or {})
            device = "cpu" if device_map is None or found is None else device_map[found]
            target = torch.device("cpu") if device == tensors.DISK else tensors.as_device(device)
            # a tensor that is still the file's own memory would change, or crash, when the file is rewritten
            state[name] = item.clone() if target.type == "cpu" else item.to(target)
    return state


def load_checkpoint_in_model(
    model: Module,
    checkpoint: Folder,
    device_map: tensors.DeviceMap | None = None,
    offload_folder: Folder | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = False,  # noqa: ARG001 - weights are read one at a time, so none are in the way
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """
    Load a checkpoint into a model, each weight on the device that `device_map` has for it; the model may be on `meta`.

    The checkpoint is a file of weights, an index of several, or a folder with either. Weights are converted to `dtype` if it
    is given (those of `keep_in_fp32_modules` stay float32 where it is float16), to the model's own where there is a map, and
    what the map puts on disk is written to `offload_folder`. With `strict`, names that are missing or unexpected raise a
    `CheckpointError` before anything is loaded; files that are damaged or foreign raise one that names them. No code in a
    checkpoint is run.
    """
    if offload_8bit_bnb:
        raise NotYetError(
            "offload_8bit_bnb=True asks for weights of 8 bits outside of the GPU, which are not offered here yet. "
            "Let transformers load the model: `from_pretrained(..., quantization_config=BitsAndBytesConfig(...))`."
        )
    tied = find_tied_parameters(model)
    warn_if_untied(model, tied)
    files = checkpoint_files(checkpoint)
    loading = _CheckpointLoader(
        model, tied, None if dtype is None else tensors.as_dtype(dtype), keep_in_fp32_modules or []
    )
    loading.offload_buffers = offload_buffers
    if device_map is not None:
        loading.apply_device_map(device_map, offload_folder)
    if not broadcast_from_rank0 or dist.get_rank() == 0:
        loading.compare_names(checkpoint, files, strict=strict)
    # a DTensor is recognised by its attributes: importing its class takes half a second
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    if device_map is None and (broadcast_from_rank0 or not full_state_dict or is_sharded):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(
            full_state_dict=full_state_dict, strict=False, broadcast_from_rank0=broadcast_from_rank0
        )
        for file in files:
            state = load_state_dict(file) if not broadcast_from_rank0 or dist.get_rank() == 0 else {}
            set_model_state_dict(model, state, options=options)
    else:
        for file in files:
            loading.load(file)
    loading.finish()


def load_checkpoint_and_dispatch(
    model: Module,
    checkpoint: Folder,
    device_map: str | tensors.DeviceMap | None = None,
    max_memory: Memory | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Module:
    """
    Load a checkpoint into a model, usually one on the `meta` device, and make it run on the devices of `device_map`.

    The map may be chosen: "auto" and "balanced" fill all accelerators evenly, "balanced_low_0" all but the first,
    "sequential" one after the other. Without a map the model is loaded and left as it is.

    >>> with init_empty_weights():
    ...     model = Large()
    >>> model = load_checkpoint_and_dispatch(model, "weights/", device_map="auto", no_split_module_classes=["Block"])
    """
    if isinstance(device_map, str):
        if device_map not in STRATEGIES:
            raise ConfigurationError(
                f"device_map={device_map!r} names no way to place a model. If passing a string for `device_map`, please choose "
                "'auto', 'balanced', 'balanced_low_0' or 'sequential'; or pass a mapping from modules to devices."
            )
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype=dtype, low_zero=low_zero)
        device_map = infer_auto_device_map(
            model, max_memory, no_split_module_classes, dtype=dtype, offload_buffers=offload_buffers
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=offload_state_dict,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map=device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def load_offloaded_weights(model: Module, index: Mapping[str, Any] | None, offload_folder: Folder) -> None:
    """Bring the weights of an index from a folder into a model, on the CPU."""
    known = index or {}
    for name, entry in known.items():
        if name.endswith("SCB"):
            continue
        beside = name.replace("weight", "SCB")
        has_scales = beside != name and beside in known
        scales = load_offloaded_weight(Path(offload_folder, f"{beside}.dat"), known[beside]) if has_scales else None
        weight = load_offloaded_weight(Path(offload_folder, f"{name}.dat"), entry).clone()
        tensors.set_module_tensor_to_device(model, name, "cpu", value=weight, fp16_statistics=scales)


class _CheckpointLoader:
    """One checkpoint on its way into one model."""

    device_map: tensors.DeviceMap | None = None
    folder: Folder | None = None
    offload_buffers = False

    def __init__(
        self, model: Module, tied: list[list[str]], dtype: torch.dtype | None, keep_in_fp32: Iterable[str]
    ) -> None:
        self.model, self.tied, self.dtype, self.keep_in_fp32 = model, tied, dtype, tuple(keep_in_fp32)
        state = model.state_dict()
        self.names = set(state)
        # of a model with parts compiled by hand, the names by which a checkpoint has its weights
        self.own_names = {original_name(name): name for name in state}
        self.on_meta = {name for name, tensor in state.items() if isinstance(tensor, Tensor) and tensor.is_meta}
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.offloaded: dict[str, Any] = {}

    def apply_device_map(self, device_map: tensors.DeviceMap, folder: Folder | None) -> None:
        """Take the devices of a map, and check that it can be followed."""
        check_tied_parameters_on_same_device(self.tied, device_map)
        check_devices(device_map)
        if tensors.DISK in device_map.values():
            if folder is None:
                parts = [name for name, device in device_map.items() if device == tensors.DISK]
                raise ConfigurationError(
                    "At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`: "
                    f"the map has {', '.join(parts)} there."
                )
            Path(folder).mkdir(parents=True, exist_ok=True)
            forget({name for name in self.names if device_of(name, device_map) == tensors.DISK}, folder)
        self.device_map, self.folder = device_map, folder

    def compare_names(self, checkpoint: Folder, files: list[Path], *, strict: bool) -> None:
        """Hold the checkpoint's names against the model's: an error where `strict`, else a warning."""
        found: set[str] = set()
        for file in files:
            with open_weights(file) as weights:
                found.update(self._own_name(name) for name in weights if not _is_scale(name, weights))
        tied = {name for group in self.tied if found.intersection(group) for name in group}
        unexpected, missing = sorted(found - self.names), sorted(self.names - found - tied)
        if strict and (unexpected or missing):
            raise CheckpointError(
                f"{checkpoint} should have the weights of {type(self.model).__name__}, and strict=True was requested. "
                f"Unexpected names: {unexpected or 'none'}; missing names: {missing or 'none'}. "
                "Pass the checkpoint of this model, or strict=False."
            )
        if unexpected:
            logger.warning(
                "Some weights of the model checkpoint at %s were not used when initializing %s: %s. That is fine where the "
                "model leaves them out on purpose.",
                checkpoint,
                type(self.model).__name__,
                set(unexpected),
            )
        lost = [name for name in missing if name in self.on_meta]
        if lost:
            logger.warning(
                "%s has no weights for %s, which stay on the meta device: the model can't run before they are set.",
                checkpoint,
                ", ".join(lost),
            )

    def load(self, file: Path) -> None:
        """Bring the weights of one file into the model."""
        if self.device_map is None and self.dtype is None:
            # tensors that have memory are filled in place; those on `meta` become the checkpoint's own
            state = {self._own_name(name): tensor for name, tensor in load_state_dict(file).items()}
            empty = {name: state.pop(name) for name in self.on_meta & state.keys()}
            try:
                self.model.load_state_dict(state, strict=False)
                if empty:
                    self.model.load_state_dict(empty, strict=False, assign=True)
            except RuntimeError as error:
                raise CheckpointError(f"{file} doesn't fit this model: {error}") from None
            return
        with open_weights(file) as weights:
            for saved_name, tensor in weights.items():
                name = self._own_name(saved_name)
                if name in self.names and not _is_scale(name, weights) and isinstance(tensor, Tensor):
                    scales = weights.get(f"{name.removesuffix('weight')}SCB") if name.endswith("weight") else None
                    self._put(name, tensor, scales)

    def _own_name(self, name: str) -> str:
        return self.own_names.get(original_name(name), name)

    def _put(self, name: str, tensor: Tensor, scales: Tensor | None) -> None:
        current = tensors.tensor_of(self.model, name)
        device: tensors.Device = torch.device("cpu") if current.is_meta else current.device
        if self.device_map is not None:
            device = device_of(name, self.device_map)
        dtype = current.dtype if self.dtype is None else self.dtype if tensor.is_floating_point() else tensor.dtype
        if self.dtype == dtype == torch.float16 and any(
            f"{part}." in name or part == name for part in self.keep_in_fp32
        ):
            dtype = torch.float32
        new = tensor.to(dtype)
        is_written = device == tensors.DISK and (self.offload_buffers or name not in self.buffers)
        if device == tensors.DISK:
            device, scales = ("meta", None) if is_written else ("cpu", scales)  # a buffer stays in memory
        target = tensors.as_device(device)
        if target.type == "cpu" and new is tensor:
            new = tensor.clone()  # what is still the file's memory would change, or crash, when the file is rewritten
        try:
            tensors.set_module_tensor_to_device(
                self.model, name, target, value=new, dtype=new.dtype, fp16_statistics=scales, clear_cache=False
            )
        except ConfigurationError as error:
            raise CheckpointError(f"The checkpoint doesn't fit this model: {error}") from None
        if is_written:
            assert self.folder is not None
            offload_weight(new, name, self.folder, self.offloaded)

    def finish(self) -> None:
        """Bring tied weights together again, and write the folder's index when all weights are there."""
        # a checkpoint has a tied weight once; where that one is on disk, the others get theirs from there
        for group in self.tied:
            written = next((name for name in group if name in self.offloaded), None)
            if written is None:
                continue
            for name in group:
                if tensors.tensor_of(self.model, name).is_meta and name not in self.offloaded:
                    assert self.folder is not None
                    weight = load_offloaded_weight(Path(self.folder, f"{written}.dat"), self.offloaded[written])
                    self._put(name, weight, None)
        save_offload_index(self.offloaded, self.folder)
        retie_parameters(self.model, self.tied)


def _is_scale(name: str, weights: Mapping[str, Any]) -> bool:
    """Whether this is what bitsandbytes keeps beside a weight of 8 bits."""
    return name.endswith("SCB") and f"{name.removesuffix('SCB')}weight" in weights
