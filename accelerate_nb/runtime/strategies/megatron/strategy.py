"""The strategy that trains models of megatron-core: in parts of layers' widths, in stages, in experts, and copies of these."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from accelerate_nb.config.options.megatron import MegatronLMPlugin, refuse_unused
from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile
from accelerate_nb.runtime.checkpoints.writer import FileToWrite
from accelerate_nb.runtime.compat.dataclasses import DistributedType, DynamoBackend
from accelerate_nb.runtime.parallelism_config import ParallelismConfig
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.base import Inputs, LossOf, Options, PrepareCall, PrepareRequest, Strategy
from accelerate_nb.runtime.strategies.megatron import conversion, model_parallel, training
from accelerate_nb.runtime.strategies.megatron.engine import MegatronEngine, MegatronModel
from accelerate_nb.runtime.strategies.megatron.model_parallel import MegatronPrecision, MegatronStep
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.training.optimizer import innermost
from accelerate_nb.runtime.world.registry import at_world_exit, be_a_group
from accelerate_nb.runtime.world.world import Mesh, World
from accelerate_nb.user_warnings import warn_user

# The plugin's names of a mesh's axes.
_DEGREES = {"pp": "pp_degree", "cp": "context_parallel_size", "tp": "tp_degree"}
# As Megatron's own training loop seeds them: stages of a pipeline draw other numbers.
_SEED_OF_A_STAGE = 100


def join_groups(world: World, plugin: MegatronLMPlugin) -> None:
    """Make Megatron's groups along the mesh, and seed its layers' random numbers; all processes call it."""
    # Megatron's order of ranks, tp-cp-ep-dp-pp from the innermost, is that of a mesh
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError):
        raise ConfigurationError(
            f"Megatron was requested on {world.device}, but computes on the current CUDA device. Take NVIDIA GPUs, or strategy='tp' or 'pp'."
        ) from None
    logger = logging.getLogger("megatron.core")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
    if not dist.is_initialized():
        be_a_group(world)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world.mesh.tp,
        pipeline_model_parallel_size=world.mesh.pp,
        context_parallel_size=world.mesh.cp,
        expert_model_parallel_size=plugin.expert_model_parallel_size,
        expert_tensor_parallel_size=plugin.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    at_world_exit(parallel_state.destroy_model_parallel)
    seed = torch.tensor([torch.initial_seed() % 2**31], device=world.device)
    dist.broadcast(seed, 0)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(int(seed.item()) + _SEED_OF_A_STAGE * stage)


class MegatronParallel(Strategy):
    """Megatron-core's layers, schedules and optimizers train a model built of them; optimizer states are in parts along `dp_shard`."""

    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    copies_are_whole = False
    hooks_get_weights = False
    gradients_kept_by = "Megatron"
    distributed_type = DistributedType.MEGATRON_LM
    schedule_types = (training.MegatronLMDummyScheduler,)
    precision: MegatronPrecision

    def __init__(self, world: World, plugin: MegatronLMPlugin | None = None) -> None:
        super().__init__(world)
        self._clip_grad = 0.0 if plugin is None else plugin.gradient_clipping
        self.megatron_lm_plugin = plugin or MegatronLMPlugin()
        self._models: list[MegatronModel] = []
        self._steps: dict[Optimizer, MegatronStep] = {}
        # a call of `prepare` with a transformers model, and the engine that it makes; `None` where models are of megatron-core themselves
        self._call: PrepareCall | None = None
        self.engine: MegatronEngine | None = None
        self._iterators: list[Any] = []

    @property
    def default_mesh(self) -> Mesh:
        """The plugin's degrees, and copies on the rest of the ranks."""
        split = {axis: getattr(self.megatron_lm_plugin, name) for axis, name in _DEGREES.items()}
        return Mesh(dp_replicate=max(self.world.size // prod(split.values()), 1), **split)

    # Choosing

    def use_parallelism(self, config: ParallelismConfig) -> None:
        """Take the configuration's mesh; Megatron makes its own groups along it, and splits sequences itself."""
        self.parallelism_config = config
        if self.world.size > 1:
            self.device_mesh = config.get_device_mesh(self.world.device.type)

    def choose_precision(self, name: str, options: PrecisionOptions) -> Precision:
        """The precision; Megatron's groups are made with it, since models are built in them."""
        plugin, mesh = self.megatron_lm_plugin, self.world.mesh
        for axis, degree in _DEGREES.items():
            if (requested := getattr(plugin, degree)) not in (1, getattr(mesh, axis)):
                raise ConfigurationError(
                    f"MegatronLMPlugin({degree}={requested}) was requested on the mesh {mesh}. Leave the degree out of one of them."
                )
        if plugin.sequence_parallelism and mesh.tp == 1:
            raise ConfigurationError(
                f"sequence_parallelism=True was requested on the mesh {mesh}, but sequences are cut among the processes that split a layer. "
                "Pass tp_degree=2 or more."
            )
        join_groups(self.world, plugin)
        self.precision = MegatronPrecision(name, options)
        return self.precision

    # Preparing

    def begin_call(self, call: PrepareCall) -> None:
        """Note what else this call of `prepare` has, of which the engine of a transformers model is made."""
        self._call = None if _transformers_model(call) is None else call

    def prepare(self, requests: Sequence[PrepareRequest]) -> list[Any]:
        """The models and optimizers of one call, in their order; optimizers that update their weights step as Megatron's do."""
        if any(request.compiling.backend != DynamoBackend.NO for request in requests):
            raise ConfigurationError(
                "dynamo_backend was requested with Megatron, which compiles nothing. Leave it out."
            )
        # a model and its optimizer, one of each
        are_models = [isinstance(request.value, Module) for request in requests]
        has_several = bool(self._models) or max(are_models.count(True), are_models.count(False)) > 1
        if requests and (self.engine is not None or (self._call is not None and has_several)):
            raise ConfigurationError(
                f"A {type(requests[-1].value).__name__} was prepared beside another model, but Megatron's engine does not work with multiple "
                "models or optimizers, and takes a model with its optimizer in one call. Make an Accelerator for each model."
            )
        if self._call is not None:
            call, self._call = self._call, None
            self.engine = self._make_engine(call)
            self.optimizer_class = training.MegatronLMOptimizerWrapper
            return [self.engine if isinstance(item.value, Module) else self.engine.optimizer for item in requests]
        prepared = super().prepare(requests)
        for optimizer in filter(self._model_of, self.optimizers):
            self.step_of(optimizer)
        return prepared

    def _make_engine(self, call: PrepareCall) -> MegatronEngine:
        """The engine that becomes of a transformers model, and of what else its call of `prepare` has."""
        self._check_call(call)
        plugin, accelerator, model = self.megatron_lm_plugin, call.accelerator, _transformers_model(call)
        plugin.set_training_args(
            _micro_batch_size(call, min if plugin.is_train_batch_min else max), self.data_replicas[1]
        )
        plugin.set_network_size_args(model, _first_batch(call))
        for optimizer in _of(call, Optimizer):
            plugin.set_optimizer_type(optimizer)
        for schedule in _of(call, training.MegatronLMDummyScheduler):
            plugin.set_scheduler_args(schedule)
        architecture = conversion.architecture_of(model.config)
        end = getattr(model.config, "eos_token_id", None)
        arguments = {
            **architecture.settings,
            "architecture": architecture,
            # the first of several tokens that end a text
            "eos_token_id": end[0] if isinstance(end, list) else end,
            **plugin.megatron_lm_default_args,
            "num_layers_per_virtual_pipeline_stage": plugin.num_layers_per_virtual_pipeline_stage,
            "megatron_dataset_flag": bool(_of(call, training.MegatronLMDummyDataLoader))
            or plugin.megatron_dataset_flag,
            **(plugin.other_megatron_args or {}),
        }
        training.initialize(accelerator, args_defaults=arguments)
        engine = MegatronEngine(accelerator, *conversion.prepare_model_optimizer_scheduler(accelerator))
        if plugin.custom_model_provider_function is not None:
            return engine
        if conversion.is_converted(model):
            weights = architecture.weights(training.get_args().padded_vocab_size)
            self.load_model_state(engine, conversion.ConvertedWeights(weights, model.state_dict()))
        elif self.world.is_main:
            warn_user(
                f"The weights of a {type(model).__name__} begin at random in Megatron's engine, as with Accelerate. Prepare one with a "
                "head, or give it others by accelerator.strategy.load_model_state(model, weights)."
            )
        return engine

    def _check_call(self, call: PrepareCall) -> None:
        """Raise an error that names what no engine can be made of, in a call of `prepare` with a transformers model."""
        refuse_unused(self.megatron_lm_plugin, by_engine=True)
        if _of(call, LRScheduler):
            raise ConfigurationError(
                "You can't use a custom scheduler with Megatron-LM. Please use the `accelerate_nb.utils.MegatronLMDummyScheduler` instead."
            )
        without_end = [item for item in _of(call, training.MegatronLMDummyScheduler) if item.total_num_steps is None]
        if without_end and self.megatron_lm_plugin.train_iters is None:
            raise ConfigurationError(
                "MegatronLMDummyScheduler was given without total_num_steps. Pass it, or MegatronLMPlugin(train_iters=...)."
            )
        if self.world.mesh.cp > 1:
            raise NotYetError(
                "context_parallel_size was requested for a model of transformers. Use tp_degree, or a model of megatron-core."
            )
        if GradientState().num_steps > 1:
            raise ConfigurationError(
                "gradient_accumulation_steps was requested with Megatron's engine. Pass MegatronLMPlugin(num_micro_batches=...) instead."
            )

    def prepare_model(self, request: PrepareRequest) -> Module:
        """The model with the first copy's weights on all copies, and with memory for its gradients."""
        refuse_unused(self.megatron_lm_plugin)
        parts = model_parallel.parts_of(request.value)
        chunks = self.trained_chunks(parts, is_placed=request.is_placed, is_trained=request.is_trained)
        return self.adopt(MegatronModel(request.value, chunks, self.megatron_lm_plugin.num_micro_batches))

    def trained_chunks(self, parts: Sequence[Any], *, is_placed: bool = True, is_trained: bool = True) -> list[Any]:
        """The consecutive parts of a model as Megatron trains them, with memory for gradients and the first copy's weights."""
        self._check(parts)
        # whether copies have parts of the optimizer's states
        is_cut = self.megatron_lm_plugin.use_distributed_optimizer or self.world.mesh.dp_shard > 1
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=is_cut)
        group = parallel_state.get_tensor_model_parallel_group()
        chunks = []
        for number, part in enumerate(parts):
            module = self.place(part) if is_placed else part
            # those that all processes along a layer's width have get the values of the first of them
            for weight in module.parameters() if group.size() > 1 else ():
                if not getattr(weight, "tensor_model_parallel", False) and not model_parallel.is_of_expert(weight):
                    dist.broadcast(weight.data, parallel_state.get_tensor_model_parallel_src_rank(), group)
            if is_trained:
                config, precision = part.config, self.precision
                if precision.name != "no":
                    config.bf16, config.fp16 = precision.name == "bf16", precision.name == "fp16"
                    config.params_dtype = config.pipeline_dtype = precision.dtype
                    module = Float16Module(config, module)
                module = DistributedDataParallel(config, settings, module, disable_bucketing=number > 0)
                module.broadcast_params()
            chunks.append(module)
        return chunks

    def _check(self, parts: Sequence[Any]) -> None:
        """Raise a `ConfigurationError` for parts of a model that can't train; stages send the precision's numbers if a model says no other."""
        mesh, plugin = self.world.mesh, self.megatron_lm_plugin
        for part in parts:
            config: Any = getattr(part, "config", None)
            if not hasattr(config, "tensor_model_parallel_size"):
                raise ConfigurationError(
                    f"A {type(part).__name__} was prepared for Megatron, but is no model of megatron-core, such as GPTModel, and none of "
                    "transformers. Build one after the Accelerator was made."
                )
            degrees = {
                "tensor_model_parallel_size": mesh.tp,
                "pipeline_model_parallel_size": mesh.pp,
                "context_parallel_size": mesh.cp,
                "expert_model_parallel_size": plugin.expert_model_parallel_size,
                "sequence_parallel": config.sequence_parallel or plugin.sequence_parallelism,
                "virtual_pipeline_model_parallel_size": len(parts) if len(parts) > 1 else None,
            }
            if config.num_moe_experts is not None:
                degrees["expert_tensor_parallel_size"] = plugin.expert_tensor_parallel_size
            for name, wanted in degrees.items():
                if (value := getattr(config, name)) != wanted:
                    raise ConfigurationError(
                        f"TransformerConfig({name}={value}) was found in {len(parts)} parts of a model on {mesh}. Build it with {wanted}."
                    )
            if mesh.pp > 1 and config.pipeline_dtype is None:
                config.pipeline_dtype = self.precision.dtype
        # messages of a stage to the next and to the former one go to the same process in a pipeline of two, which mixes them up
        if len(parts) > 1 and mesh.pp == 2 and not parts[0].config.overlap_p2p_comm:
            raise ConfigurationError(
                "Interleaved stages were requested in a pipeline of 2. Pass overlap_p2p_comm=True, batch_p2p_comm=False, or pp_degree=4."
            )

    def adopt(self, model: MegatronModel) -> MegatronModel:
        """Train this model, too, which is returned."""
        model.config.grad_scale_func = self.precision.scale
        self._models.append(model)
        return model

    def _model_of(self, optimizer: Optimizer) -> MegatronModel | None:
        """The prepared model whose weights an optimizer updates; `None` as long as there is none."""
        weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        return next((model for model in self._models if weights <= {id(weight) for weight in model.parameters()}), None)

    def step_of(self, optimizer: Optimizer) -> MegatronStep:
        """The step of an optimizer, prepared or as it was made; `ConfigurationError` where no prepared model has its weights."""
        optimizer = innermost(optimizer)
        if optimizer in self._steps:
            return self._steps[optimizer]
        if (model := self._model_of(optimizer)) is None:
            raise ConfigurationError(
                "An optimizer updates weights of no model that Megatron has, or of several. Give prepare each model with its own optimizer."
            )
        if self._steps and self.precision.name == "fp16":
            raise ConfigurationError(
                "A second optimizer was prepared in fp16, but Megatron has one factor for all losses. Use mixed_precision='bf16'."
            )
        self._steps[optimizer] = MegatronStep(optimizer, model, self.precision, self._clip_grad)
        return self._steps[optimizer]

    def replace(self, item: Any) -> Any:
        """A loader in batches for all parts of a step; of an engine's n-th placeholder of a loader the n-th of its three iterators."""
        if self.engine is None:
            return item
        if isinstance(item, training.MegatronLMDummyDataLoader):
            self._iterators = self._iterators or list(training.prepare_data_loader(self.engine.accelerator, item))
            return self._iterators.pop(0)
        return training.with_all_parts(item) if isinstance(item, DataLoader) else item

    def wrap_schedule(self, scheduler: Any, optimizers: Sequence[Any]) -> Any:
        """The engine's schedule in the place of its placeholder; `None` for one that moves with the optimizer."""
        if not isinstance(scheduler, training.MegatronLMDummyScheduler):
            return None
        if self.engine is None:
            raise ConfigurationError(
                "A MegatronLMDummyScheduler was prepared without a model of transformers, whose engine moves it. Pass a schedule of torch."
            )
        return training.MegatronLMSchedulerWrapper(self.engine.scheduler, optimizers)

    # A step

    def backward(self, loss: Tensor, *, steps: int = 1, is_boundary: bool = True, **options: Any) -> None:
        """Compute gradients, unless an engine has done so already, whose losses have no graph."""
        if self.engine is None or loss.requires_grad:
            super().backward(loss, steps=steps, is_boundary=is_boundary, **options)

    def train_step(
        self, model: Module, inputs: Inputs, targets: Any, loss_of: LossOf, *, steps: int = 1, is_boundary: bool = True
    ) -> Tensor:
        """Forward, loss and backward of a batch, its parts in the order of Megatron's schedule."""
        if isinstance(model, MegatronEngine):
            raise ConfigurationError(
                "accelerator.train_step was called with Megatron's engine, which computes its losses itself. Call model(**batch)."
            )
        if not isinstance(model, MegatronModel):
            return super().train_step(model, inputs, targets, loss_of, steps=steps, is_boundary=is_boundary)
        return model.train_step(inputs, targets, loss_of, steps=steps)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Gather gradients and bring them to their true size, before something reads them; an engine has stepped by then."""
        for optimizer in optimizers if self.engine is None else ():
            self.step_of(optimizer).prepare()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Let an optimizer step on the gradients of all copies, or look at an engine's last step; whether none overflowed."""
        if closure is not None:
            raise ConfigurationError(
                "A closure was passed to a step by Megatron. Compute the loss before, without one."
            )
        if self.engine is not None:
            return not getattr(optimizer, "skipped_iter", False)
        return self.step_of(optimizer).step()

    def zero_grad(self, optimizer: Optimizer, **options: Any) -> None:
        """Throw an optimizer's gradients away."""
        self.step_of(optimizer).zero_grad()

    def clip_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients of all parts down to a norm; returns the norm that they had, of an engine its last step's."""
        steps = self._steps_on(parameters)
        if self.engine is not None:
            return torch.tensor([step.last_norm or 0.0 for step in steps]).sum()
        norms = torch.tensor([step.norm(float(norm_type)) for step in steps])
        norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
        for step in steps:
            step.clip(max_norm, norm.item())
        return norm

    def clip_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut each gradient at a value."""
        if self.engine is not None:
            raise ConfigurationError(
                "clip_grad_value_ was called with Megatron's engine, which has stepped already. Pass MegatronLMPlugin(gradient_clipping=...)."
            )
        for step in self._steps_on(parameters):
            step.clip_value(clip_value)

    def _steps_on(self, parameters: Iterable[Tensor] | Tensor) -> list[MegatronStep]:
        """The steps on models of which some of these weights are."""
        wanted = {id(weight) for weight in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        return [step for step in self._steps.values() if wanted & {id(weight) for weight in step.model.parameters()}]

    # Weights

    def model_state(self, model: Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete weights by Megatron's names, on the CPU of each machine's first process; all processes call it."""
        return model_parallel.complete_state(self.unwrap(model), is_kept=self.world.is_local_main)

    def load_model_state(self, model: Module, state: Mapping[str, Any], **options: Any) -> None:
        """Give a prepared model complete weights, of which each process takes its parts."""
        model_parallel.load_complete(self.unwrap(model), state)
        for step in self._steps_on(model.parameters()):
            step.inner.reload_model_params()

    # Checkpoints

    def files(self, models: Sequence[Any], weights: Any, optimizers: Sequence[Any], **how: Any) -> list[FileToWrite]:
        """This process's parts, in folders of the format of Megatron's distributed checkpoints."""
        return model_parallel.files(self.world, models, [self.step_of(optimizer) for optimizer in optimizers])

    def load(
        self, folder: Path, models: Sequence[Any], optimizers: Sequence[Any], options: Options, model_options: Options
    ) -> list[LoadedFile]:
        """This process's parts, in whichever degrees they were written."""
        return model_parallel.load(self.world, folder, models, [self.step_of(optimizer) for optimizer in optimizers])

    def set_window_gradients(self, model: Module, saved: Mapping[str, Tensor]) -> None:
        """Have no gradients, as after a step."""
        for step in self._steps_on(model.parameters()):
            step.zero_grad()

    def release(self) -> None:
        """Release what was prepared."""
        super().release()
        self._models.clear()
        self._steps.clear()
        self.engine = self.optimizer_class = None
        self._iterators.clear()

    def close(self) -> None:
        """The training is over, and Megatron's groups with it."""
        super().close()
        parallel_state.destroy_model_parallel()


def _of(call: PrepareCall, type_: type) -> list[Any]:
    """The objects of this type."""
    return [item for item in call.objects if isinstance(item, type_)]


def _first_batch(call: PrepareCall) -> Any:
    """A batch of the size that a loader gives, of its first samples; `None` of data that can be read once."""
    loader = next(iter(_of(call, DataLoader)), None)
    if loader is None or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    count = min(loader.batch_size, len(loader.dataset))
    with torch.random.fork_rng(devices=[]):
        return loader.collate_fn([loader.dataset[index] for index in range(count)])


def _transformers_model(call: PrepareCall) -> Any:
    """The first model of transformers, of which an engine is made; `None` where there is none."""
    for model in _of(call, Module):
        config = getattr(model, "config", None)
        if isinstance(getattr(config, "model_type", None), str) and not hasattr(config, "tensor_model_parallel_size"):
            return model
    return None


def _micro_batch_size(call: PrepareCall, choose: Callable[[list[int]], int]) -> int:
    sizes = [item.dataset_args.get("micro_batch_size") for item in _of(call, training.MegatronLMDummyDataLoader)]
    for loader in _of(call, DataLoader):
        sizes.append(loader.batch_size or getattr(loader.batch_sampler or loader.sampler, "batch_size", None))
    if not (known := [size for size in sizes if size is not None]):
        raise ConfigurationError(
            "You must specify a training or evaluation dataloader in `accelerate.prepare()` when using Megatron-LM, with its batch size."
        )
    return choose(known)
