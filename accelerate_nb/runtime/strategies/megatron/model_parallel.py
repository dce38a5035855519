"""Megatron-core's process groups, over the ranks of the world."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.megatron.plugin import MegatronLMPlugin
from accelerate_nb.runtime.world.registry import at_world_exit, be_a_group
from accelerate_nb.runtime.world.world import World

# As Megatron's own training loop seeds them: stages of a pipeline draw other numbers.
_SEED_OF_A_STAGE = 100


def join_groups(world: World, plugin: MegatronLMPlugin) -> None:
    """
    Make Megatron's groups along the axes of the world's mesh, and seed the random numbers of its layers; all processes call it.

    Its order of ranks, tp-cp-ep-dp-pp from the innermost, is that of a mesh. `ConfigurationError` where there is no current CUDA
    device, on which megatron-core makes its tensors.
    """
    _check_device(world.device)
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


def has_groups() -> bool:
    """Whether this process has joined Megatron's groups."""
    return bool(parallel_state.model_parallel_is_initialized())


def leave_groups() -> None:
    """Forget Megatron's groups, where there are any."""
    if has_groups():
        parallel_state.destroy_model_parallel()


def degrees() -> dict[str, int]:
    """The degrees in which a model is split."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


def settings() -> dict[str, int]:
    """The degrees in which a model is split, as a `TransformerConfig` has them."""
    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    return {f"{names[axis]}_parallel_size": degree for axis, degree in degrees().items()}


def random_states() -> dict[str, Any]:
    """Where the random numbers of Megatron's layers stand on this process."""
    return dict(tensor_parallel.get_cuda_rng_tracker().get_states())


def set_random_states(states: dict[str, Any]) -> None:
    """Have the random numbers of layers go on from there."""
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(states))


def _check_device(device: torch.device) -> None:
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError):
        raise ConfigurationError(
            f"Megatron was requested on {device}, but megatron-core computes on the current CUDA device, and there is none. Launch it "
            "on NVIDIA GPUs, or train with strategy='tp' or 'pp' here."
        ) from None
