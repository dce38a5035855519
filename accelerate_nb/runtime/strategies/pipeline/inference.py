"""Inference with a model whose layers are on several processes: Accelerate's `prepare_pippy`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from accelerate_nb.errors import DataError
from accelerate_nb.runtime.operations.collective import broadcast
from accelerate_nb.runtime.operations.nested import ignorant_find_batch_size, send_to_device
from accelerate_nb.runtime.strategies.pipeline.microbatches import microbatches
from accelerate_nb.runtime.strategies.pipeline.staged_model import Stage, StagedModel, move_weights, plan_stages
from accelerate_nb.runtime.strategies.pipeline.strategy import StageRanks
from accelerate_nb.runtime.world.registry import current_world
from accelerate_nb.runtime.world.state import PartialState


def prepare_pippy(
    model: Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),  # noqa: ARG001  # Accelerate's name
    example_kwargs: dict[str, Any] | None = None,  # noqa: ARG001  # Accelerate's name
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> Any:
    """
    The same model, whose forward brings a batch through stages on all processes; there is no backward.

    The first process's batch counts; the others pass one of the same shapes. The last process gets the output, or all of them with
    `gather_output`, and the others `None`. A batch is cut in `num_chunks` parts along its first dimension, as many as there are
    processes by default; they need not be equally large. `split_points` names the modules at which the second and later stages
    begin; by default stages have about equally many weights, and modules of `no_split_module_classes` stay whole. Nothing is traced,
    so the examples are not needed; the names are Accelerate's.

    Each process has its stage on its device; the layers of others stay where they were.
    """
    PartialState()
    world = current_world()
    if world.size == 1:
        return model.to(world.device)
    begins = "auto" if split_points is None else split_points
    layers = plan_stages(model, world.size, begins, no_split=no_split_module_classes)
    staged = StagedModel(model, layers, world.device)
    staged.held = (world.rank,)
    # what this process computes with: all but the layers of other stages
    other = {id(part) for layer in layers if layer.stage != world.rank for part in layer.module.modules()}
    move_weights((part for part in model.modules() if id(part) not in other), world.device)
    stages, ranks = {world.rank: Stage(staged, world.rank)}, StageRanks(world.device, world.group, range(world.size))
    names = [layer.name for layer in layers]
    stage_of_layers = [layer.stage for layer in layers]
    model.hf_split_points = [names[stage_of_layers.index(stage)] for stage in range(1, world.size)]  # type: ignore[assignment]
    own_forward = model.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if staged.is_running:
            return own_forward(*arguments, **keywords)
        if find_pippy_batch_size(arguments, keywords) is None:
            raise DataError(
                "A model that is split into stages was called without a tensor whose first dimension is the samples'. Pass the batch on "
                "all processes."
            )
        with torch.no_grad():
            batch = broadcast(send_to_device((arguments, keywords), world.device))
            output = ranks.forward(stages, microbatches(batch, num_chunks or world.size))
            return ranks.output_on_all(output) if gather_output else output

    # as Accelerate has it: `extract_model_from_parallel` finds the model's own forward so
    forward.__wrapped__ = own_forward  # type: ignore[attr-defined]
    model.forward = forward
    return model


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """The number of samples of the first argument that has some."""
    values = [*(args or ()), *(kwargs or {}).values()]
    return next((size for value in values if (size := ignorant_find_batch_size(value)) is not None), None)
