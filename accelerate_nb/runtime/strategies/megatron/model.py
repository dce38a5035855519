"""A model of megatron-core as a training loop calls it, and what it has to be to train on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from accelerate_nb.errors import ConfigurationError, DataError, StateError
from accelerate_nb.runtime.strategies.base import Inputs, LossOf
from accelerate_nb.runtime.strategies.megatron.plugin import MegatronLMPlugin
from accelerate_nb.runtime.strategies.pipeline.microbatches import batch_size, merged, microbatches
from accelerate_nb.runtime.training.unwrap import ModelWrapper
from accelerate_nb.runtime.world.mesh import Mesh


def check(parts: Sequence[Any], mesh: Mesh, plugin: MegatronLMPlugin, dtype: torch.dtype) -> None:
    """Raise a `ConfigurationError` for parts of a model that can't train; stages send numbers of `dtype` where a model says no other."""
    for part in parts:
        _check_degrees(part, mesh, plugin)
        if mesh.pp > 1 and part.config.pipeline_dtype is None:
            part.config.pipeline_dtype = dtype
    config = parts[0].config
    if len(parts) > 1 and config.virtual_pipeline_model_parallel_size != len(parts):
        raise ConfigurationError(
            f"{len(parts)} parts of a model were prepared together, but its TransformerConfig has virtual_pipeline_model_parallel_size="
            f"{config.virtual_pipeline_model_parallel_size}. Build it with {len(parts)}."
        )
    # messages of a stage to the next and to the former one go to the same process in a pipeline of two, which mixes them up
    if len(parts) > 1 and mesh.pp == 2 and not config.overlap_p2p_comm:
        raise ConfigurationError(
            "Interleaved stages were requested in a pipeline of 2 processes, where Megatron needs messages in pairs. Build the "
            "TransformerConfig with overlap_p2p_comm=True and batch_p2p_comm=False, or take pp_degree=4 or more."
        )


def _check_degrees(model: Any, mesh: Mesh, plugin: MegatronLMPlugin) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "tensor_model_parallel_size"):
        raise ConfigurationError(
            f"A {type(model).__name__} was prepared for Megatron, but it is no model of megatron-core. Build one, such as GPTModel, "
            "with a TransformerConfig, after the Accelerator was made, or give a model of transformers to accelerator.prepare(...)."
        )
    degrees = {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": plugin.expert_model_parallel_size,
        "sequence_parallel": config.sequence_parallel or plugin.sequence_parallelism,
    }
    if config.num_moe_experts is not None:
        degrees["expert_tensor_parallel_size"] = plugin.expert_tensor_parallel_size
    for name, wanted in degrees.items():
        if (value := getattr(config, name)) != wanted:
            raise ConfigurationError(
                f"TransformerConfig({name}={value}) was found in a model that is prepared on {mesh}. Build it with {name}={wanted}."
            )


class MegatronModel(ModelWrapper):
    """This process's part of a model, with its consecutive `chunks`; a pipeline's output is the last stage's, on all processes."""

    def __init__(self, module: Module, chunks: Sequence[Module], microbatch_count: int) -> None:
        super().__init__(module)
        # no submodules, so that weights have one name each
        self.__dict__["chunks"] = list(chunks)
        self.microbatch_count = microbatch_count
        self.loss_scale: Callable[[Tensor], Tensor] | None = None

    chunks: list[Any]

    @property
    def config(self) -> Any:
        """The `TransformerConfig` of the model."""
        return self.chunks[0].config

    def train(self, mode: bool = True) -> MegatronModel:
        """Switch to training, or to evaluation."""
        super().train(mode)
        for chunk in self.chunks:
            chunk.train(mode)
        return self

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's output; in a pipeline without a backward, since its gradients come by `Accelerator.train_step`."""
        from megatron.core import parallel_state

        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return self.chunks[0](*arguments, **keywords)
        if torch.is_grad_enabled():
            raise StateError(
                "A model in stages was called with gradients, but Megatron's pipeline computes backwards in its schedule. Call "
                "accelerator.train_step(model, ...) to train, or the model inside of torch.no_grad()."
            )
        # interleaved stages take no fewer parts than there are stages: each all of a batch that they do not divide
        count = parallel_state.get_pipeline_model_parallel_world_size() if len(self.chunks) > 1 else 1
        inputs = (arguments, keywords)
        is_divided = batch_size(inputs) % count == 0
        parts = microbatches((inputs, None), count) if is_divided else [(inputs, None)] * count
        outputs = self._run(parts, lambda output, _: output, forward_only=True)
        kept = outputs if is_divided else outputs[:1]
        return self._from_last(merged(kept, [1] * len(kept)) if kept else None)

    def train_step(self, inputs: Inputs, targets: Any, loss_of: LossOf, *, steps: int) -> Tensor:
        """Forward and backward by Megatron's schedule, gradients divided by `steps`; the mean loss of the parts, on all stages."""
        from megatron.core import parallel_state

        sequence_parts = parallel_state.get_context_parallel_world_size()
        # Megatron multiplies by the number of parts of a sequence, whose losses are means over a part here
        divisor = steps * sequence_parts

        def scaled(output: Any, wanted: Any) -> tuple[Tensor, Tensor]:
            loss = loss_of(output, wanted)
            # what is divided in place afterwards
            return loss / divisor if divisor > 1 else loss * 1, loss.detach().float()

        losses = self._run(self.equal_parts((inputs, targets)), scaled, forward_only=False)
        mean: Tensor = self._from_last(torch.stack(losses).mean() if losses else None)
        if sequence_parts == 1:
            return mean
        total = mean.clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total.div_(sequence_parts)

    def equal_parts(self, batch: Any) -> list[Any]:
        """The parts of a batch that Megatron's schedule brings through the model; `DataError` where they are not equal."""
        size = batch_size(batch)
        if size % self.microbatch_count:
            raise DataError(
                f"A batch of {size} samples was passed to Megatron, which cuts it in {self.microbatch_count} equal parts. Take a batch "
                f"size that {self.microbatch_count} divides (drop_last=True leaves a rest out), or another num_micro_batches."
            )
        return microbatches(batch, self.microbatch_count)

    def _run(
        self, parts: Sequence[tuple[Inputs, Any]], result_of: Callable[[Any, Any], Any], *, forward_only: bool
    ) -> list[Any]:
        """What the last stage has of each part: what `result_of` makes of its output and targets, or reports after its loss."""
        tensors = (leaf for leaf in tree_flatten(parts[0][0])[0] if isinstance(leaf, Tensor) and leaf.ndim > 1)
        first = next(tensors, None)
        if first is None:
            raise DataError(
                "A model of Megatron got no tensor of the shape (samples, length). Pass it the tokens of a batch first."
            )

        def forward_step(iterator: Iterator[tuple[Inputs, Any]], chunk: Module) -> tuple[Any, Callable[..., Any]]:
            (arguments, keywords), targets = next(iterator)
            return chunk(*arguments, **keywords), lambda output, **_: result_of(output, targets)

        shape = (first.shape[1], first.shape[0])
        return self.run_schedule(forward_step, parts, shape, forward_only, collects=forward_only)

    def run_schedule(
        self,
        forward_step: Callable[[Any, Any], Any],
        parts: Sequence[Any],
        shape: tuple[int, int],
        forward_only: bool,
        *,
        collects: bool = False,
    ) -> list[Any]:
        """Bring parts through the stages; returns what the last stage reports of each, with `collects` anything."""
        # shape: the length of a part's sequences, and their number
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config.grad_scale_func = self.loss_scale
        is_interleaved = len(self.chunks) > 1
        schedule = get_forward_backward_func(
            parallel_state.get_pipeline_model_parallel_world_size(), len(self.chunks) if is_interleaved else None
        )
        iterators = [iter(list(parts)) for _ in self.chunks]
        found: list[Any] = schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if is_interleaved else iterators[0],
            model=self.chunks if is_interleaved else self.chunks[0],
            num_microbatches=len(parts),
            seq_length=shape[0],
            micro_batch_size=shape[1],
            forward_only=forward_only,
            collect_non_loss_data=collects,
        )
        return found

    def _from_last(self, value: Any) -> Any:
        """The last stage's tensors, one or several in a dictionary, on all stages."""
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return value
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        described = [None if value is None else tree_map(lambda tensor: tensor.detach().to("meta"), value)]
        dist.broadcast_object_list(described, last, group)
        leaves, structure = tree_flatten(described[0] if value is None else value)
        device = torch.device(torch.cuda.current_device())
        found = [
            torch.empty_like(leaf, device=device) if value is None else leaf.detach().contiguous() for leaf in leaves
        ]
        for leaf in found:
            dist.broadcast(leaf, last, group)
        return tree_unflatten(found, structure)
