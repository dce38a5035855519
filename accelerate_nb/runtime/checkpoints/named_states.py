"""States by names of weights, complete or in parts: what FSDP writes, for any number of processes and any strategy."""

import json
import pickle
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.host_copy import is_missing
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, read
from accelerate_nb.runtime.checkpoints.manifest import ManifestEntry, entry_of
from accelerate_nb.runtime.checkpoints.shards import LIST, MODEL_FOLDER, list_shards
from accelerate_nb.runtime.checkpoints.writer import DirectWriter, FileToWrite, LastFile, named, sync
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.operations.sharded_tensors import part_of, whole
from accelerate_nb.runtime.training.repoint import load_original_state, original_name, original_state
from accelerate_nb.runtime.world.world import World

_VERSION = "1.0.0"
_COMPLETE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def files_of_parts(world: World, name: str, state: Mapping[str, Any]) -> list[FileToWrite]:
    """The files of a state, to be written to a folder of this name: of each DTensor the parts that no other process writes."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=False)
    planner.set_up_planner(dict(state), is_coordinator=world.is_main)
    plans = gather_object([planner.create_local_plan()])
    plans, metadata = planner.create_global_plan(plans)
    own = planner.finish_plan(plans[world.rank])
    contents = [planner.resolve_data(item) for item in own.items]
    tensors = [content.detach() if isinstance(content, Tensor) else content.getvalue() for content in contents]
    part = PartFile(f"{name}/{part_name(world.rank)}", tensors)
    if not world.is_main:
        return [part]
    return [part, PartList(f"{name}/{LIST}", metadata, indices=[[item.index for item in plan.items] for plan in plans])]


@dataclass(frozen=True, slots=True)
class PartFile(FileToWrite):
    """One process's tensors and bytes, one after the other; a note beside the file has their lengths, until the list is there."""

    lengths: list[int] = field(default_factory=list)

    def write(self, folder: Path, blocks: DirectWriter) -> ManifestEntry:
        path = folder / self.name
        entry = FileToWrite.write(self, folder, blocks)
        with named(path):
            _note(path).write_text(json.dumps({"lengths": self.lengths, "entry": asdict(entry)}), encoding="utf-8")
        return entry

    def fill(self, file: Any) -> None:
        self.lengths.clear()
        for item in self.content:
            begin = file.tell()
            if isinstance(item, Tensor):
                # what is saved of a tensor is its whole storage
                torch.save(item if item.untyped_storage().nbytes() == item.nbytes else item.clone(), file)
            else:
                file.write(item)
            self.lengths.append(file.tell() - begin)


@dataclass(frozen=True, slots=True)
class PartList(LastFile):
    """The list of all parts: the file, the offset and the length of each."""

    indices: Sequence[Sequence[MetadataIndex]] = ()

    def write_last(self, folder: Path) -> dict[str, ManifestEntry]:
        path = folder / self.name
        places: dict[MetadataIndex, _StorageInfo] = {}
        entries: dict[str, ManifestEntry] = {}
        for rank, indices in enumerate(self.indices):
            part = path.parent / part_name(rank)
            try:
                note = json.loads(_note(part).read_text(encoding="utf-8"))
            except FileNotFoundError:
                raise CheckpointError(
                    f"{part} was written by rank {rank}, but is not there: a checkpoint in parts needs a folder that all "
                    "machines share. Save to such a folder, or with state_dict_type='FULL_STATE_DICT'."
                ) from None
            offset = 0
            for index, length in zip(indices, note["lengths"], strict=True):
                places[index] = _StorageInfo(part.name, offset, length)
                offset += length
            entries[part.relative_to(folder).as_posix()] = ManifestEntry(**note["entry"])
        metadata = replace(
            self.content, storage_data=places, storage_meta=StorageMeta(save_id=str(uuid.uuid4())), version=_VERSION
        )
        path.write_bytes(pickle.dumps(metadata))
        sync(path)
        for rank in range(len(self.indices)):
            _note(path.parent / part_name(rank)).unlink()
        return {**entries, self.name: entry_of(path)}


def part_name(rank: int) -> str:
    """The name of a process's file."""
    return f"__{rank}_0.distcp"


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.written")


def parts_of(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Complete weights as a sharded model has them; one that does not fit stays, for the model to name it."""
    return {
        name: part_of(value, like[name])
        if isinstance(value, Tensor) and name in like and like[name].shape == value.shape
        else value
        for name, value in state.items()
    }


def model_folder(index: int) -> str:
    """The folder of a model's parts."""
    return f"{MODEL_FOLDER}_{index}"


def optimizer_folder(index: int) -> str:
    """The folder of the parts of an optimizer's state."""
    return f"{file_names.OPTIMIZER_NAME}_{index}"


def model_state(model: Module, *, learning_only: bool = False) -> dict[str, Any]:
    """This process's weights and buffers of a model, those that are sharded as DTensors; or the weights alone that learn."""
    learning = {original_name(name) for name, weight in model.named_parameters() if weight.requires_grad}
    return {
        name: value
        for name, value in original_state(model).items()
        if not is_missing(value) and (name in learning or not learning_only)  # what is missing is another process's
    }


def model_files(world: World, state: dict[str, Any], index: int, in_parts: bool) -> list[FileToWrite]:
    """The files of this process for a model's weights, under Accelerate's names and keys; all processes call it."""
    if in_parts:
        return files_of_parts(world, model_folder(index), {"model": state})
    complete = {}
    for name, value in state.items():
        # all processes make a tensor whole, and one keeps it, in host memory
        found = whole(value) if isinstance(value, Tensor) else value
        if world.is_main:
            complete[name] = found.cpu() if isinstance(found, Tensor) else found
    return [FileToWrite(file_names.numbered(MODEL_FOLDER, index), complete)] if world.is_main else []


def optimizer_files(
    world: World, optimizer: Any, models: Sequence[Module], index: int, in_parts: bool
) -> list[FileToWrite]:
    """The files of this process for the state of an optimizer of one of these models; all processes call it."""
    state = optimizer_state(optimizer, models, None if in_parts else _COMPLETE)
    if in_parts:
        return files_of_parts(world, optimizer_folder(index), {"optimizer": state})
    return [FileToWrite(file_names.numbered(file_names.OPTIMIZER_NAME, index), state)] if world.is_main else []


def optimizer_state(optimizer: Any, models: Sequence[Module], options: states.StateDictOptions | None = None) -> Any:
    """This process's part of the state of an optimizer of one of these models, by names of weights; none before its first step."""
    bare, model = _bare(optimizer), _model_of(optimizer, models)
    if not bare.state:  # torch would make a step, which counts
        return _by_names(bare.state_dict(), model, bare)
    return states.get_optimizer_state_dict(model, bare, options=options)


def set_optimizer_state(optimizer: Any, models: Sequence[Module], state: dict[str, Any]) -> None:
    """Give an optimizer of one of these models what `optimizer_state` returned."""
    states.set_optimizer_state_dict(_model_of(optimizer, models), _bare(optimizer), state)


def load(folder: Path, models: Sequence[Module], optimizers: Sequence[Any]) -> list[LoadedFile]:
    """This process's parts of all models' weights and all optimizers' states, or the whole of those that are not sharded."""
    found = [load_model(folder, index, model) for index, model in enumerate(models)]
    return found + [load_optimizer(folder, index, optimizer, models) for index, optimizer in enumerate(optimizers)]


def load_model(
    folder: Path, index: int, model: Module, *, learning_only: bool = False, in_parts: bool = False
) -> LoadedFile:
    """This process's part of a model's weights, or the whole of those that are not sharded; `in_parts` where there are both."""
    parts, complete = folder / model_folder(index), folder / file_names.numbered(MODEL_FOLDER, index)
    expected, state = f"the weights of model {index}", model_state(model, learning_only=learning_only)

    def receive(loaded: dict[str, Any]) -> Any:
        elsewhere = {name: value for name, value in original_state(model).items() if is_missing(value)}
        return load_original_state(model, {**loaded, **elsewhere}, strict=not learning_only)

    if complete.exists() and not (in_parts and (parts / LIST).is_file()):
        found = {original_name(name): value for name, value in read(complete, expected, mmap=True).items()}
        return LoadedFile(complete, expected, parts_of(found, state), receive)
    if not (parts / LIST).is_file():
        raise CheckpointError(
            f"{parts / LIST} does not exist, and {expected} were expected in its folder. Prepare the same objects as when the "
            "checkpoint was saved, or choose another folder."
        )
    content = {"model": _like(state)}
    list_shards(parts).load_into(content)
    return LoadedFile(parts, expected, content["model"], receive)


def load_optimizer(
    folder: Path, index: int, optimizer: Any, models: Sequence[Module], *, in_parts: bool = True
) -> LoadedFile:
    """
    This process's part of an optimizer's state: in parts, or complete by names of weights or by their numbers.

    Where there are both, `in_parts` says which.
    """
    model, bare = _model_of(optimizer, models), _bare(optimizer)
    parts, complete = folder / optimizer_folder(index), folder / file_names.numbered(file_names.OPTIMIZER_NAME, index)
    expected = f"the state of optimizer {index}"
    if (parts / LIST).exists() and (in_parts or not complete.exists()):
        shards = list_shards(parts)
        if any("state" in position[:2] for position in shards.positions.values()):
            content = {"optimizer": _like(_state_of_step(model, bare))}
        else:  # it was saved before the first step
            content = {"optimizer": _by_names({**bare.state_dict(), "state": {}}, model, bare)}
        shards.load_into(content)
        state, path = content["optimizer"], parts
    else:
        state, path = _by_names(read(complete, expected, mmap=True), model, bare), complete
        weights = {original_name(name): weight for name, weight in model.named_parameters()}
        kept = {name: parts_of(values, dict.fromkeys(values, weights[name])) for name, values in state["state"].items()}
        state = {**state, "state": kept}
    return LoadedFile(path, expected, state, lambda loaded: set_optimizer_state(optimizer, models, loaded))


def _state_of_step(model: Module, optimizer: Any) -> Any:
    """An optimizer's state, or one of the same shapes where it has not stepped, and has none afterwards either."""
    if optimizer.state:
        return states.get_optimizer_state_dict(model, optimizer)
    gradients = {weight: weight.grad for group in optimizer.param_groups for weight in group["params"]}
    for weight in gradients:
        weight.grad = None  # torch makes no state where there is one
    try:
        return states.get_optimizer_state_dict(model, optimizer)
    finally:
        optimizer.state.clear()
        for weight, gradient in gradients.items():
            weight.grad = gradient


def _like(state: Any) -> Any:
    """A state with new tensors in place of its own: what is read changes nothing until all of a checkpoint could be read."""
    return tree_map(lambda value: torch.empty_like(value) if isinstance(value, Tensor) else value, state)


def _by_names(state: dict[str, Any], model: Module, optimizer: Any) -> dict[str, Any]:
    """The state with weights by their names, where it has them by their numbers, as optimizers themselves do."""
    groups = state["param_groups"]
    if not all(isinstance(key, int) for group in groups for key in group["params"]):
        return state
    names = {id(weight): original_name(name) for name, weight in model.named_parameters()}
    ordered = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    by_number = dict(zip(numbers, ordered, strict=True))
    return {
        "state": {by_number[number]: kept for number, kept in state["state"].items()},
        "param_groups": [{**group, "params": [by_number[number] for number in group["params"]]} for group in groups],
    }


def _bare(optimizer: Any) -> Any:
    """The optimizer inside of a prepared one."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _model_of(optimizer: Any, models: Sequence[Module]) -> Module:
    """The model whose weights an optimizer updates."""
    learning = {id(weight) for group in _bare(optimizer).param_groups for weight in group["params"]}
    found = next((model for model in models if learning <= {id(weight) for weight in model.parameters()}), None)
    if found is None:
        raise ConfigurationError(
            "An optimizer updates weights that are in no prepared model, or in several, so its state can't be kept by their "
            "names. Prepare its model, and make one optimizer for each model."
        )
    return found
