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
from torch.utils.data import DataLoader

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile
from accelerate_nb.runtime.checkpoints.writer import FileToWrite
from accelerate_nb.runtime.compat.enums import DistributedType, DynamoBackend
from accelerate_nb.runtime.parallelism_config import ParallelismConfig
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.base import Inputs, LossOf, Options, PrepareCall, PrepareRequest, Strategy
from accelerate_nb.runtime.strategies.megatron import model_parallel, preparation
from accelerate_nb.runtime.strategies.megatron.engine import MegatronEngine, MegatronModel, check
from accelerate_nb.runtime.strategies.megatron.model_parallel import MegatronPrecision, MegatronStep
from accelerate_nb.runtime.strategies.megatron.plugin import MegatronLMPlugin, refuse_unused
from accelerate_nb.runtime.training.optimizer import innermost
from accelerate_nb.runtime.world.mesh import Mesh
from accelerate_nb.runtime.world.registry import at_world_exit, be_a_group
from accelerate_nb.runtime.world.world import World

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
    schedule_types = (preparation.MegatronLMDummyScheduler,)
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

    @property
    def is_distributed(self) -> bool:
        """Whether copies have parts of the optimizer's states."""
        return self.megatron_lm_plugin.use_distributed_optimizer or self.world.mesh.dp_shard > 1

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
        self._call = None if preparation.transformers_model(call) is None else call

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
            self.engine = preparation.engine_of(call)
            self.optimizer_class = preparation.MegatronLMOptimizerWrapper
            return [self.engine if isinstance(item.value, Module) else self.engine.optimizer for item in requests]
        prepared = super().prepare(requests)
        for optimizer in self.optimizers:
            self._find_step(optimizer)
        return prepared

    def prepare_model(self, request: PrepareRequest) -> Module:
        """The model with the first copy's weights on all copies, and with memory for its gradients."""
        refuse_unused(self.megatron_lm_plugin)
        parts = model_parallel.parts_of(request.value)
        chunks = self.trained_chunks(parts, is_placed=request.is_placed, is_trained=request.is_trained)
        return self.adopt(MegatronModel(request.value, chunks, self.megatron_lm_plugin.num_micro_batches))

    def trained_chunks(self, parts: Sequence[Any], *, is_placed: bool = True, is_trained: bool = True) -> list[Any]:
        """The consecutive parts of a model as Megatron trains them, with memory for gradients and the first copy's weights."""
        check(parts, self.world.mesh, self.megatron_lm_plugin, self.precision.dtype)
        chunks = []
        group = parallel_state.get_tensor_model_parallel_group()
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
                settings = DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, use_distributed_optimizer=self.is_distributed
                )
                module = DistributedDataParallel(config, settings, module, disable_bucketing=number > 0)
                module.broadcast_params()
            chunks.append(module)
        return chunks

    def adopt(self, model: MegatronModel) -> MegatronModel:
        """Train this model, too, which is returned."""
        model.config.grad_scale_func = self.precision.scale
        self._models.append(model)
        return model

    def _find_step(self, optimizer: Optimizer) -> MegatronStep | None:
        """The step of an optimizer; `None` as long as no prepared model has its weights."""
        if optimizer in self._steps:
            return self._steps[optimizer]
        weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        model = next((item for item in self._models if weights <= {id(weight) for weight in item.parameters()}), None)
        if model is None:
            return None
        if self._steps and self.precision.name == "fp16":
            raise ConfigurationError(
                "A second optimizer was prepared in fp16, but Megatron has one factor for all losses. Use mixed_precision='bf16'."
            )
        self._steps[optimizer] = MegatronStep(
            optimizer, model, self.precision, is_distributed=self.is_distributed, clip_grad=self._clip_grad
        )
        return self._steps[optimizer]

    def step_of(self, optimizer: Optimizer) -> MegatronStep:
        """The step of an optimizer, prepared or as it was made; `ConfigurationError` where no prepared model has its weights."""
        found = self._find_step(innermost(optimizer))
        if found is None:
            raise ConfigurationError(
                "An optimizer updates weights of no model that Megatron has, or of several. Give prepare each model with its own optimizer."
            )
        return found

    def replace(self, item: Any) -> Any:
        """A loader in batches for all parts of a step; of an engine's n-th placeholder of a loader the n-th of its three iterators."""
        if self.engine is None:
            return item
        if isinstance(item, preparation.MegatronLMDummyDataLoader):
            self._iterators = self._iterators or list(preparation.prepare_data_loader(self.engine.accelerator, item))
            return self._iterators.pop(0)
        return preparation.with_all_parts(item) if isinstance(item, DataLoader) else item

    def wrap_schedule(self, scheduler: Any, optimizers: Sequence[Any]) -> Any:
        """The engine's schedule in the place of its placeholder; `None` for one that moves with the optimizer."""
        if not isinstance(scheduler, preparation.MegatronLMDummyScheduler):
            return None
        if self.engine is None:
            raise ConfigurationError(
                "A MegatronLMDummyScheduler was prepared without a model of transformers, whose engine moves it. Pass a schedule of torch."
            )
        return preparation.MegatronLMSchedulerWrapper(self.engine.scheduler, optimizers)

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

    def load_model_state(self, model: Module, state: dict[str, Any], **options: Any) -> None:
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
