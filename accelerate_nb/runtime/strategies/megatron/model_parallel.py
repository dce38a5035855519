"""A model in parts: the step of an optimizer on it, its complete weights, and its checkpoints in Megatron's distributed format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.optim import Optimizer

from accelerate_nb.errors import CheckpointError, ConfigurationError, NotYetError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, read
from accelerate_nb.runtime.checkpoints.named_states import files_of_parts
from accelerate_nb.runtime.checkpoints.shards import LIST, ShardIndex, list_shards
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, VerbatimFile
from accelerate_nb.runtime.compat.dataclasses import GradScalerKwargs
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.megatron.engine import MegatronModel
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user


def degrees() -> dict[str, int]:
    """The degrees in which a model is split."""
    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    return {axis: getattr(parallel_state, f"get_{name}_parallel_world_size")() for axis, name in names.items()}


_TYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MegatronPrecision(Precision):
    """A type in which a model has its weights and computes; `loss_scaler` is Megatron's, where the type is float16."""

    def __init__(self, name: str, options: PrecisionOptions) -> None:
        if name not in _TYPES:
            raise ConfigurationError(
                f"mixed_precision={name!r} was requested, but Megatron's models compute in 8 bits by TransformerConfig(fp8=...). Pass that."
            )
        self.name = name
        self.dtype = _TYPES[name]
        self.loss_scaler: Any = None
        if name == "fp16":
            factors = options.scaling or GradScalerKwargs()
            growth, backoff, interval = factors.growth_factor, factors.backoff_factor, factors.growth_interval
            # no tolerance of an overflow, as torch's scaler has none
            self.loss_scaler = DynamicGradScaler(factors.init_scale, 1.0, growth, backoff, interval, hysteresis=1)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor of float16."""
        return loss if self.loss_scaler is None else loss * self.loss_scaler.scale.to(loss.device)


class MegatronStep:
    """The step of a person's optimizer on one model, by Megatron's optimizer; `clip_grad` is the norm to clip to, 0 for none."""

    def __init__(
        self, optimizer: Optimizer, model: MegatronModel, precision: MegatronPrecision, clip_grad: float
    ) -> None:
        self.model, self.loss_scaler = model, precision.loss_scaler
        self._clip_grad = clip_grad
        # whether a gradient overflowed; `None` as long as they are not ready for a step
        self._overflowed: bool | None = None
        # the norm from which the gradients of this or the last step were clipped; `None` where they were not
        self.last_norm: float | None = None
        self.inner = _around(optimizer, model, precision)
        self.inner.tp_group = parallel_state.get_tensor_model_parallel_group()
        # of a model's parts; where copies have parts of the optimizer, all processes
        self._norm_group = self.inner.get_grad_stats_parallel_group() or dist.group.WORLD
        # one overflow, of whichever process's experts, is that of all
        self.inner.grad_stats_parallel_group = dist.group.WORLD
        for weight in filter(is_of_expert, model.parameters()):
            # Megatron would add the gradients of biases of other experts, whose tokens it has brought here already
            weight.sequence_parallel = False  # type: ignore[attr-defined]  # Megatron's own mark

    def prepare(self) -> bool:
        """Sum up the gradients of copies and of parts, once before a step; whether one of them overflowed."""
        if self._overflowed is None:
            self.last_norm = None
            finalize_model_grads(self.model.chunks)
            self._overflowed = bool(self.inner.prepare_grads())
        return self._overflowed

    def norm(self, norm_type: float) -> float:
        """The norm of the gradients of all parts of the model; infinity where one overflowed."""
        if self.prepare():
            return float("inf")
        gradients: list[Tensor] = self.inner.get_main_grads_for_grad_norm()
        if self.model.config.expert_model_parallel_size == 1:
            return float(get_grad_norm_fp32(gradients, norm_type, self._norm_group))
        # those of experts that are on this process and not on all are measured by themselves
        experts = [getattr(weight, "main_param", weight) for weight in self.model.parameters() if is_of_expert(weight)]
        group = parallel_state.get_expert_tensor_parallel_group()
        own = [item.grad for item in experts if tensor_parallel.param_is_not_tensor_parallel_duplicate(item, group)]
        known = {id(weight.grad) for weight in experts}
        shared = [gradient for gradient in gradients if id(gradient) not in known]
        norm = get_grad_norm_fp32(shared, norm_type, self._norm_group)
        group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        of_experts = get_grad_norm_fp32([gradient for gradient in own if gradient is not None], norm_type, group)
        return float(torch.linalg.vector_norm(torch.tensor([norm, of_experts]), norm_type))

    def clip(self, max_norm: float, norm: float) -> None:
        """Scale gradients of this norm down to another one."""
        if not self.prepare():
            clip_grad_by_total_norm_fp32(self.inner.get_parameters(), max_norm, norm)
        self.last_norm = norm

    def clip_value(self, value: float) -> None:
        """Cut each gradient at plus and minus a value."""
        self.prepare()
        for weight in self.inner.get_parameters():
            if weight.grad is not None:
                weight.grad.clamp_(-value, value)

    def step(self) -> bool:
        """Update the weights; whether no gradient overflowed."""
        overflowed = self.prepare()
        if self._clip_grad > 0 and self.last_norm is None:
            self.clip(self._clip_grad, self.norm(2.0))
        self._overflowed = None
        return not overflowed and bool(self.inner.step_with_ready_grads())

    def zero_grad(self) -> None:
        """Throw the gradients away."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()
        self._overflowed = None


def is_of_expert(weight: Tensor) -> bool:
    """Whether a weight is of an expert that is on some of the processes; Megatron marks it."""
    return not getattr(weight, "allreduce", True)


def _around(optimizer: Optimizer, model: MegatronModel, precision: MegatronPrecision) -> Any:
    """Megatron's optimizer around torch's: in 32 bits, with a 32-bit copy of weights of 16 bits, or with a part of the copy."""
    copies = model.chunks[0]
    is_distributed = isinstance(copies, DistributedDataParallel) and copies.ddp_config.use_distributed_optimizer
    config = OptimizerConfig(
        fp16=precision.name == "fp16",
        bf16=precision.name == "bf16",
        params_dtype=precision.dtype,
        use_distributed_optimizer=is_distributed,
    )
    if not is_distributed and precision.name == "no":
        return FP32Optimizer(optimizer, config, None)
    if not is_distributed:
        return Float16OptimizerWithFloat16Params(optimizer, config, precision.loss_scaler, None)
    if any(is_of_expert(weight) for weight in model.parameters()):
        raise NotYetError(
            "use_distributed_optimizer was requested for a model whose experts are on different processes. Leave one of them out."
        )
    return DistributedOptimizer(
        optimizer,
        config,
        precision.loss_scaler,
        None,
        model_chunks=model.chunks,
        per_model_buffers={index: chunk.buffers for index, chunk in enumerate(model.chunks)},
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=None,
        data_parallel_group_idx=parallel_state.get_model_parallel_group().rank(),
        distributed_optimizer_instance_id=0,
    )


# Complete weights


def parts_of(model: Module) -> list[Any]:
    """The consecutive parts of a model on this process: several where stages are interleaved."""
    return list(model) if isinstance(model, ModuleList) else [model]


def _sharded_state(model: Module) -> dict[int, Any]:
    """The weights of each part of a model on this process, with their places in the whole."""
    # layers have their numbers in their names, whichever stage they are on; Megatron adds its groups to the dictionary
    return {
        number: part.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for number, part in enumerate(parts_of(model))
    }


def _load_sharded_state(model: Module, tree: Mapping[int, Any]) -> None:
    for number, part in enumerate(parts_of(model)):
        part.load_state_dict(tree[number], strict=False)


def complete_state(model: Module, *, is_kept: bool) -> dict[str, Tensor]:
    """The complete weights on the CPU where they are kept, gathered one at a time, else nothing; all processes call it."""
    own: dict[str, list[ShardedTensor]] = {}
    for value in _main_replicas(_sharded_state(model)):
        own.setdefault(value.key, []).append(value)
    state: dict[str, Tensor] = {}
    for name in dict.fromkeys(gather_object(list(own))):
        pieces = gather_object(
            [(value.global_shape, value.global_slice(), value.data.detach().cpu()) for value in own.get(name, ())]
        )
        if is_kept:
            shape, _, first = pieces[0]
            state[name] = torch.empty(shape, dtype=first.dtype)
            for _, place, piece in pieces:
                state[name][place] = piece
    return state


def load_complete(model: Module, state: Mapping[str, Tensor]) -> None:
    """Give each process its parts of complete weights; `CheckpointError` where some are missing, or of other shapes."""

    def fill(values: Sequence[ShardedTensor]) -> None:
        wrong = []
        for value in values:
            whole = state.get(value.key)
            if whole is None or tuple(whole.shape) != tuple(value.global_shape):
                wrong.append(f"{value.key} {tuple(value.global_shape)}")
            else:
                value.data = whole[value.global_slice()]
        if wrong:
            raise CheckpointError(
                f"Complete weights were given to a model, without {len(wrong)} of its own, or in other shapes: "
                f"{', '.join(wrong[:8])}. Give it those of the same configuration, by Megatron's names."
            )

    _load_sharded_state(model, _fill_tree(_sharded_state(model), fill))


def _fill_tree(tree: Any, fill: Callable[[list[ShardedTensor]], None]) -> Any:
    """A tree with the tensors that `fill` gives its sharded ones; what is no tensor stays as it is."""
    prepared, _, factories = load_preprocess(tree)
    fill(_sharded(prepared))
    content = dict_list_map_outplace(
        lambda value: value.data if isinstance(value, (ShardedTensor, ShardedObject)) else value, prepared
    )
    return apply_factory_merges(content, factories)


def _sharded(tree: Any) -> list[ShardedTensor]:
    return [value for value in nested_values(tree) if isinstance(value, ShardedTensor)]


def _main_replicas(tree: Any) -> list[ShardedTensor]:
    """The parts of a tree's values that this process writes, of those that several have."""
    return [value for value in _sharded(load_preprocess(tree)[0]) if is_main_replica(value.replica_id)]


# Checkpoints

COMMON = "common.pt"
# As Megatron names what an optimizer remembers: `optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight`.
_PREFIX = "optimizer.state."
# The 32-bit copy of a weight of 16 bits, as Megatron calls it.
_COPY = "fp32_param"


def files(world: World, models: Sequence[MegatronModel], steps: Sequence[MegatronStep]) -> list[FileToWrite]:
    """The files of this process; all processes call it."""
    found: list[FileToWrite] = []
    for index, model in enumerate(models):
        found += _folder_files(world, f"{file_names.MEGATRON_MODEL_NAME}_{index}", _model_tree(model), {})
    for index, step in enumerate(steps):
        found += _optimizer_files(world, f"{file_names.OPTIMIZER_NAME}_{index}", step)
    content = {"degrees": degrees(), "states": dict(tensor_parallel.get_cuda_rng_tracker().get_states())}
    found.append(FileToWrite(file_names.of_rank(file_names.MEGATRON_RNG_STATE_NAME, world.rank), content))
    return found


def load(
    world: World, folder: Path, models: Sequence[MegatronModel], steps: Sequence[MegatronStep]
) -> list[LoadedFile]:
    """This process's parts of what was saved, in whichever degrees; models come before optimizers."""
    found = []
    for index, model in enumerate(models):
        path, expected = folder / f"{file_names.MEGATRON_MODEL_NAME}_{index}", f"the weights of model {index}"
        tree = _read_tree(_list_folder(path, expected), _model_tree(model))
        found.append(LoadedFile(path, expected, tree, partial(_load_sharded_state, model.module)))
    found += [_loaded_optimizer(folder, index, step) for index, step in enumerate(steps)]
    path = folder / file_names.of_rank(file_names.MEGATRON_RNG_STATE_NAME, world.rank)
    if not path.exists():
        return found  # of fewer processes, of which a warning speaks already
    expected = "the random states of Megatron's layers"
    content = read(path, expected)
    if content["degrees"] == degrees():
        found.append(LoadedFile(path, expected, content["states"], tensor_parallel.get_cuda_rng_tracker().set_states))
    elif world.is_main:
        warn_user(
            f"{folder} was saved in the degrees {content['degrees']}. Random numbers of layers go on from where they are."
        )
    return found


def _folder_files(world: World, name: str, tree: dict[Any, Any], common: dict[str, Any]) -> list[FileToWrite]:
    """This process's files of a folder, of a tree of `sharded_state_dict`'s leaves; all processes call it."""
    files = files_of_parts(world, name, _containers(_main_replicas(tree)))
    if world.is_main:
        files.append(FileToWrite(f"{name}/{COMMON}", common))
        # by which Megatron recognises its checkpoints
        mark = json.dumps(asdict(CheckpointingConfig("torch_dist"))).encode()
        files.append(VerbatimFile(f"{name}/metadata.json", mark))
    return files


def _list_folder(folder: Path, expected: str) -> ShardIndex:
    """The content of a folder, without its numbers; `CheckpointError` where it is none of Megatron's."""
    if not (folder / LIST).is_file():
        raise CheckpointError(
            f"{folder / LIST} does not exist, and {expected} was expected. Load what was saved in a training by Megatron of these objects."
        )
    return list_shards(folder)


def _read_tree(shards: ShardIndex, tree: dict[Any, Any]) -> Any:
    """The tree with this process's parts of the values, on the CPU; what is no tensor stays as it is."""

    def fill(values: Sequence[ShardedTensor]) -> None:
        for value in values:
            value.data = torch.empty(value.local_shape, dtype=value.dtype)
        shards.load_into(_containers(values))

    return _fill_tree(tree, fill)


def _containers(values: Iterable[ShardedTensor]) -> dict[str, Any]:
    """The parts by their keys, as torch.distributed.checkpoint takes them."""
    found: dict[str, list[Any]] = {}
    for value in values:
        # one of several experts has fewer axes than the whole
        shape = (1,) * value.prepend_axis_num + tuple(value.local_shape)
        whole = replace(value, data=value.data.view(shape), local_shape=shape, prepend_axis_num=0)
        found.setdefault(value.key, []).append(CheckpointableShardedTensor.from_sh_ten(whole))
    return {key: LocalShardsContainer(parts) for key, parts in found.items()}


def _model_tree(model: MegatronModel) -> dict[Any, Any]:
    if getattr(model.config, "fp8", None):
        raise NotYetError(
            "A checkpoint of a model in 8 bits was requested, whose scales are not kept. Train in bf16, or call accelerator.save_model."
        )
    return _sharded_state(model.module)


def _learning(step: MegatronStep) -> list[tuple[Tensor, Any]]:
    """The weights of an optimizer, with their places in the whole model as Megatron describes them."""
    weights = [weight for weight in step.model.parameters() if weight.requires_grad]
    places = get_param_id_to_sharded_param_map(_model_tree(step.model), weights)
    return [(weights[index], places[index]) for index in sorted(places)]


def _updated(inner: Any, weight: Tensor) -> tuple[Tensor | None, slice]:
    """The tensor that this process's optimizer updates of a weight, `None` where another copy does, and which part it is."""
    if not isinstance(inner, DistributedOptimizer):
        return getattr(weight, "main_param", weight), slice(None)
    if weight not in inner.model_param_group_index_map:
        return None, slice(0)
    group, number = inner.model_param_group_index_map[weight]
    part = inner._get_model_param_range_map(weight)["param"]
    return inner.optimizer.param_groups[group]["params"][number], slice(part.start, part.end)


def _remembered(inner: Any, weight: Tensor) -> dict[str, Tensor]:
    """What an optimizer remembers of what it updates of a weight: tensors of that shape, and numbers, which are tensors without one."""
    main, _ = _updated(inner, weight)
    if main is None:
        return {}
    copy = {} if main.dtype == weight.dtype else {_COPY: main}
    kept = {**inner.optimizer.state.get(main, {}), **copy}
    found = {name: value for name, value in kept.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.shape not in ((), main.shape):
            raise NotYetError(
                f"save_state was called with {type(inner.optimizer).__name__}, which remembers {name!r} of a weight: neither a tensor of "
                "its shape nor a number. Train with AdamW or SGD, or save the weights alone with accelerator.save_model."
            )
    return found


def _optimizer_files(world: World, name: str, step: MegatronStep) -> list[FileToWrite]:
    inner, learning = step.inner, _learning(step)
    own = [_remembered(inner, weight) for weight, _ in learning]
    described = [
        (place.key, {key: None if value.dim() else value.item() for key, value in found.items()})
        for (_, place), found in zip(learning, own, strict=True)
    ]
    # by a weight's name in the whole model, numbers and the names of tensors; of copies that have parts each knows some weights
    known: dict[str, dict[str, float | None]] = {}
    for weight_name, found in gather_object(described):
        known.setdefault(weight_name, {}).update(found)
    tree: dict[Any, Any] = {}
    for number, ((weight, place), found) in enumerate(zip(learning, own, strict=True)):
        tree[number] = {}
        for key in sorted(key for key, value in known[place.key].items() if value is None):
            value = found.get(key)
            if isinstance(inner, DistributedOptimizer):
                # copies have parts, whose sum is the whole where each has zeros elsewhere
                flat = torch.zeros(weight.numel(), device=weight.device)
                if value is not None:
                    flat[_updated(inner, weight)[1]] = value.flatten()
                dist.all_reduce(flat, group=inner.data_parallel_group)
                value = flat.view(weight.shape).cpu() if is_main_replica(place.replica_id) else None
            if value is not None:
                tree[number][key] = make_sharded_optimizer_tensor(place, value.detach(), f"{_PREFIX}{key}")
    groups = [{key: group[key] for key in group if key != "params"} for group in inner.optimizer.param_groups]
    scaler = None if step.loss_scaler is None else step.loss_scaler.state_dict()
    numbers = {name: {key: value for key, value in found.items() if value is not None} for name, found in known.items()}
    return _folder_files(world, name, tree, {"param_groups": groups, "numbers": numbers, "grad_scaler": scaler})


def _loaded_optimizer(folder: Path, index: int, step: MegatronStep) -> LoadedFile:
    path, expected = folder / f"{file_names.OPTIMIZER_NAME}_{index}", f"the state of optimizer {index}"
    shards = _list_folder(path, expected)
    common = read(path / COMMON, f"the settings of optimizer {index}")
    numbers: dict[str, dict[str, Any]] = common.get("numbers", {})
    found = {name: item for name, item in shards.tensors.items() if name.startswith(_PREFIX)}
    if "numbers" not in common:
        # a folder of an earlier version, where each number is a tensor among the shards
        for name, value in shards.load([name for name, item in found.items() if item.dim() == 0]).items():
            key, _, weight_name = name.removeprefix(_PREFIX).partition(".")
            numbers.setdefault(weight_name, {})[key] = value.item()
    kept = {name for name, item in found.items() if item.dim() > 0}
    # such as `exp_avg`
    keys = sorted({name.removeprefix(_PREFIX).partition(".")[0] for name in kept})
    learning = _learning(step)
    tree: dict[int, dict[str, Any]] = {}
    for number, (weight, place) in enumerate(learning):
        values = {key: make_sharded_optimizer_tensor(place, weight.detach().float(), f"{_PREFIX}{key}") for key in keys}
        # weights of 32 bits have no copy
        tree[number] = {
            key: value
            for key, value in values.items()
            if all(piece.key in kept for piece in _sharded(load_preprocess({key: value})[0]))
        }
        for key, value in numbers.get(place.key, {}).items():
            # whatever torch's default is: AdamW counts its steps in 32 bits
            tree[number][key] = torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else None)
    # without weights of which nothing is kept
    states = _read_tree(shards, tree)
    loaded = [(weight, states.get(number, {})) for number, (weight, _) in enumerate(learning)]
    return LoadedFile(path, expected, {**common, "states": loaded}, partial(_receive, step))


def _receive(step: MegatronStep, content: dict[str, Any]) -> None:
    inner, optimizer = step.inner, step.inner.optimizer
    updated = {id(main) for group in optimizer.param_groups for main in group["params"]}
    optimizer.state.clear()
    for weight, values in content["states"]:
        main, part = _updated(inner, weight)
        if main is None or id(main) not in updated:
            continue
        own = {
            name: value if value.dim() == 0 else value.flatten()[part].clone().view(main.shape)
            for name, value in values.items()
        }
        if (copy := own.pop(_COPY, None)) is not None:
            main.data.copy_(copy)
        if own:
            optimizer.state[main] = own
    state = optimizer.state_dict()
    groups = zip(content["param_groups"], state["param_groups"], strict=True)
    # which brings them to the device and the type of what is updated
    optimizer.load_state_dict({**state, "param_groups": [{**saved, "params": now["params"]} for saved, now in groups]})
    if not any(_COPY in values for _, values in content["states"]):
        inner.reload_model_params()
    if step.loss_scaler is not None and content["grad_scaler"] is not None:
        step.loss_scaler.load_state_dict(content["grad_scaler"])
