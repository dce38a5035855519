"""Megatron-core's process groups over the ranks of the world, and an optimizer's step on the gradients that are summed up over them."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.megatron.engine import MegatronModel
from accelerate_nb.runtime.strategies.megatron.plugin import MegatronLMPlugin
from accelerate_nb.runtime.world.registry import at_world_exit, be_a_group
from accelerate_nb.runtime.world.world import World

# As Megatron's own training loop seeds them: stages of a pipeline draw other numbers.
_SEED_OF_A_STAGE = 100


def join_groups(world: World, plugin: MegatronLMPlugin) -> None:
    """Make Megatron's groups along the mesh, and seed its layers' random numbers; all processes call it."""
    # Megatron's order of ranks, tp-cp-ep-dp-pp from the innermost, is that of a mesh
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError):
        raise ConfigurationError(
            f"Megatron was requested on {world.device}, but megatron-core computes on the current CUDA device, and there is none. Launch "
            "it on NVIDIA GPUs, or train with strategy='tp' or 'pp' here."
        ) from None
    logger = logging.getLogger("megatron.core")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
    if not dist.is_initialized():
        be_a_group(world)
    leave_groups()
    mesh = world.mesh
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        context_parallel_size=mesh.cp,
        expert_model_parallel_size=plugin.expert_model_parallel_size,
        expert_tensor_parallel_size=plugin.expert_tensor_parallel_size,
        create_gloo_process_groups=world.backend != "gloo",
    )
    at_world_exit(leave_groups)
    seed = torch.tensor([torch.initial_seed() % 2**31], device=world.device)
    dist.broadcast(seed, 0)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(int(seed.item()) + _SEED_OF_A_STAGE * stage)


def leave_groups() -> None:
    """Forget Megatron's groups, where there are any."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def degrees() -> dict[str, int]:
    """The degrees in which a model is split."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


_TYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MegatronPrecision(Precision):
    """A type in which a model has its weights and computes; `loss_scaler` is Megatron's, where the type is float16."""

    def __init__(self, name: str, options: PrecisionOptions) -> None:
        if name not in _TYPES:
            raise ConfigurationError(
                f"mixed_precision={name!r} was requested with Megatron, which computes in 8 bits where its model is built so. Pass "
                "mixed_precision='bf16', and TransformerConfig(fp8=...) to the model."
            )
        self.name = name
        self.dtype = _TYPES[name]
        self.loss_scaler: Any = None
        if name == "fp16":
            settings = {} if options.scaling is None else options.scaling.to_kwargs()
            # torch's defaults, and no tolerance of an overflow, as torch's scaler has none
            self.loss_scaler = DynamicGradScaler(
                initial_scale=settings.get("init_scale", 65536.0),
                min_scale=1.0,
                growth_factor=settings.get("growth_factor", 2.0),
                backoff_factor=settings.get("backoff_factor", 0.5),
                growth_interval=settings.get("growth_interval", 2000),
                hysteresis=1,
            )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor of float16."""
        return loss if self.loss_scaler is None else loss * self.loss_scaler.scale.to(loss.device)


_OF_NO_EXPERT = {"is_expert_parallel": False, "is_decoupled_lr": False}


class MegatronStep:
    """The step of a person's optimizer on one model, by Megatron's optimizer; `clip_grad` is the norm to clip to, 0 for none."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: MegatronModel,
        precision: MegatronPrecision,
        *,
        is_distributed: bool,
        clip_grad: float,
    ) -> None:
        self.model, self.loss_scaler = model, precision.loss_scaler
        self._clip_grad = clip_grad
        # whether gradients are ready for a step, and whether one of them overflowed
        self._is_ready, self._overflowed, self._is_clipped = False, False, False
        # the norm that the gradients of the last step had; `None` where nothing measured it
        self.last_norm: float | None = None
        for number, group in enumerate(optimizer.param_groups):
            # Megatron finds a group in a checkpoint by these, so that they differ; the engine has set its own
            for name, value in {"wd_mult": 1.0, "lr_mult": float(number), **_OF_NO_EXPERT}.items():
                group.setdefault(name, value)
        self.inner = _around(optimizer, model, precision, is_distributed)
        self.inner.tp_group = parallel_state.get_tensor_model_parallel_group()
        self._norm_group = self.inner.get_grad_stats_parallel_group()
        if model.config.expert_model_parallel_size > 1:
            # one overflow, of whichever process's experts, is that of all
            self.inner.grad_stats_parallel_group = dist.group.WORLD
        for weight in filter(is_of_expert, model.parameters()):
            # Megatron would add the gradients of biases of other experts, whose tokens it has brought here already
            weight.sequence_parallel = False  # type: ignore[attr-defined]  # Megatron's own mark

    def prepare(self) -> bool:
        """Sum up the gradients of copies and of parts, once before a step; whether one of them overflowed."""
        if not self._is_ready:
            finalize_model_grads(self.model.chunks)
            self._overflowed = bool(self.inner.prepare_grads())
            self._is_ready = True
        return self._overflowed

    def norm(self, norm_type: float) -> float:
        """The norm of the gradients of all parts of the model; infinity where one overflowed."""
        if self.prepare():
            return float("inf")
        # those of experts that are on this process and not on all are measured by themselves
        experts = [getattr(weight, "main_param", weight) for weight in self.model.parameters() if is_of_expert(weight)]
        group = parallel_state.get_expert_tensor_parallel_group()
        of_experts: list[Tensor] = [
            weight.grad
            for weight in experts
            if weight.grad is not None and param_is_not_tensor_parallel_duplicate(weight, group)
        ]
        known = {id(gradient) for gradient in of_experts}
        shared = [gradient for gradient in self.inner.get_main_grads_for_grad_norm() if id(gradient) not in known]
        norm = float(get_grad_norm_fp32(shared, norm_type, self._norm_group))
        if self.model.config.expert_model_parallel_size == 1:
            return norm
        group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        norms = torch.tensor([norm, float(get_grad_norm_fp32(of_experts, norm_type, group))])
        return float(torch.linalg.vector_norm(norms, norm_type))

    def clip(self, max_norm: float, norm: float) -> None:
        """Scale gradients of this norm down to another one."""
        self._is_clipped, self.last_norm = True, norm
        if not self.prepare():
            clip_grad_by_total_norm_fp32(self.inner.get_parameters(), max_norm, norm)

    def clip_value(self, value: float) -> None:
        """Cut each gradient at plus and minus a value."""
        self.prepare()
        for weight in self.inner.get_parameters():
            if weight.grad is not None:
                weight.grad.clamp_(-value, value)

    def step(self) -> bool:
        """Update the weights; whether no gradient overflowed."""
        if self._clip_grad > 0 and not self._is_clipped:
            self.clip(self._clip_grad, self.norm(2.0))
        overflowed = self.prepare()
        self._is_ready, self._is_clipped = False, False
        return not overflowed and bool(self.inner.step_with_ready_grads())

    def zero_grad(self) -> None:
        """Throw the gradients away."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()
        self._is_ready, self._is_clipped = False, False


def is_of_expert(weight: Tensor) -> bool:
    """Whether a weight is of an expert that is on some of the processes; Megatron marks it."""
    return not getattr(weight, "allreduce", True)


def _around(optimizer: Optimizer, model: MegatronModel, precision: MegatronPrecision, is_distributed: bool) -> Any:
    """Megatron's optimizer around torch's: in 32 bits, with a 32-bit copy of weights of 16 bits, or with a part of the copy."""
    config = OptimizerConfig(
        lr=optimizer.param_groups[0]["lr"],
        fp16=precision.name == "fp16",
        bf16=precision.name == "bf16",
        params_dtype=precision.dtype,
        use_distributed_optimizer=is_distributed,
        clip_grad=0.0,
    )
    if not is_distributed:
        found: Any = (
            FP32Optimizer(optimizer, config, None)
            if precision.name == "no"
            else Float16OptimizerWithFloat16Params(optimizer, config, precision.loss_scaler, None)
        )
        found.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
        return found
    if not isinstance(optimizer, (Adam, AdamW)):
        raise ConfigurationError(
            f"Megatron's distributed optimizer was requested for {type(optimizer).__name__}, but it keeps parts of Adam's states alone. "
            "Pass torch.optim.AdamW or Adam, or leave use_distributed_optimizer out."
        )
    if any(is_of_expert(weight) for weight in model.parameters()):
        raise NotYetError(
            "Megatron's distributed optimizer was requested for a model whose experts are on different processes, which is not offered "
            "here yet. Leave use_distributed_optimizer and dp_shard out, or expert_model_parallel_size."
        )
    has_gloo = dist.get_backend() != "gloo"
    found = DistributedOptimizer(
        optimizer,
        config,
        precision.loss_scaler,
        None,
        model_chunks=model.chunks,
        per_model_buffers={index: chunk.buffers for index, chunk in enumerate(model.chunks)},
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
        if has_gloo
        else None,
        data_parallel_group_idx=parallel_state.get_model_parallel_group().rank(),
        distributed_optimizer_instance_id=0,
    )
    found.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
    return found
