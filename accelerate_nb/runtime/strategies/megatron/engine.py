"""The engine that trains a model by Megatron's schedules, where a call of the model makes a whole step."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleList

from accelerate_nb.errors import ConfigurationError, NotYetError, StateError
from accelerate_nb.runtime.strategies.megatron import train_steps
from accelerate_nb.runtime.strategies.megatron.model import MegatronModel


def choose(logits: Tensor, *, temperature: float | None, top_k: int | None, top_p: float | None) -> Tensor:
    """A token of each row of `logits` (samples, words): the likeliest, or one that is drawn as temperature, top_k and top_p say."""
    if (temperature is None and not top_k and not top_p) or top_k == 1 or temperature == 0:
        return logits.argmax(dim=-1)
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(1.0 if temperature is None else float(temperature))])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p:
        warpers.append(TopPLogitsWarper(top_p))
    return torch.multinomial(warpers(None, logits).softmax(dim=-1), 1).squeeze(1)


class MegatronEngine(MegatronModel):
    """
    A model of megatron-core with its optimizer and its schedule, in Accelerate's words.

    While it trains, `model(**batch)` throws gradients away, brings the batch's `num_micro_batches` parts forwards and backwards through
    the stages, steps, and moves the schedule on; while it evaluates, forwards alone. It returns the mean loss of all copies, a number
    without a graph, on all processes; in the class of outputs of transformers where the model's configuration has `return_dict`.
    `accelerator.backward(loss)`, `optimizer.step()` and `optimizer.zero_grad()` are then done already.

    `model` is a list of the parts of a model on this process, as `prepare_model_optimizer_scheduler` returns them.
    """

    def __init__(self, accelerator: Any, model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        args, plugin = train_steps.get_args(), accelerator.state.megatron_lm_plugin
        inner = [train_steps.innermost(chunk) for chunk in model]
        super().__init__(inner[0] if len(inner) == 1 else ModuleList(inner), model, plugin.num_micro_batches)
        self.__dict__["accelerator"] = accelerator
        self.optimizer, self.scheduler = optimizer, scheduler
        if plugin.custom_train_step_class is not None:
            self.train_step_handler = plugin.custom_train_step_class(args, **(plugin.custom_train_step_kwargs or {}))
        else:
            self.train_step_handler = train_steps.GPTTrainStep(accelerator, args)
        self.iteration = 0
        accelerator.strategy.adopt(self)

    accelerator: Any

    @property
    def base_model(self) -> Any:
        """The first part of the model on this process, as Megatron trains it."""
        return self.chunks[0]

    def get_module_config(self) -> Any:
        """The `TransformerConfig` by which schedules go."""
        return self.config

    def get_batch_data_iterator(self, batch_data: dict[str, Any]) -> Any:
        """An iterator over the parts of a batch, or a list of them, one for each of several parts of the model."""
        parts = self.equal_parts(batch_data) if batch_data else []
        iterators: list[Iterator[Any]] = [iter(list(parts)) for _ in self.chunks]
        return iterators if len(iterators) > 1 else iterators[0]

    def forward(self, *arguments: Any, **batch_data: Any) -> Any:
        """A step on a batch, or its evaluation: the loss, or an output of transformers that has it."""
        if arguments:
            raise ConfigurationError(
                "A model of Megatron's engine was called with positional arguments. Call it with a batch's tensors by name: model(**batch)."
            )
        args = train_steps.get_args()
        if self.training:
            losses, _, _, _ = self.train_step(**batch_data)
            self.iteration += 1
            args.iteration = self.iteration
            args.consumed_train_samples += args.global_batch_size
        else:
            losses = self.eval_step(**batch_data)
        numbers = [value.float() for value in losses.values() if value.ndim == 0]
        loss = sum(numbers, torch.zeros((), device=torch.cuda.current_device()))
        made: Any = self.train_step_handler.model_output_class
        return loss if made is None else made(loss=loss, logits=losses.get("logits"))

    def train_step(self, **batch_data: Any) -> tuple[dict[str, Tensor], int, float | None, int | None]:  # type: ignore[override]  # Accelerate's
        """
        A step on a batch; returns its losses by name, 1 where an overflow left the step out, and the norm of gradients.

        The norm is `None` without `gradient_clipping`. The last of four is `None`: zeros in gradients are not counted.
        """
        if self.optimizer is None:
            raise StateError(
                "A model of Megatron's engine was called to train, but it has no optimizer. Give both to one call of prepare, or call "
                "model.eval() first."
            )
        step = self.accelerator.strategy.step_of(self.optimizer)
        step.zero_grad()
        losses = self._losses(batch_data, forward_only=False)
        step.last_norm = None
        is_skipped = not step.step()
        self.optimizer.skipped_iter = is_skipped
        if self.scheduler is not None and not is_skipped:
            self.scheduler.step(increment=train_steps.get_args().global_batch_size)
        return losses, int(is_skipped), step.last_norm, None

    def eval_step(self, **batch_data: Any) -> dict[str, Tensor]:
        """The losses of a batch by name, on all processes, without gradients."""
        with torch.no_grad():
            losses = self._losses(batch_data, forward_only=True)
        args = train_steps.get_args()
        args.consumed_valid_samples += args.global_batch_size
        return losses

    def _losses(self, batch: dict[str, Any], *, forward_only: bool) -> dict[str, Tensor]:
        args, plugin = train_steps.get_args(), self.accelerator.state.megatron_lm_plugin
        parts = self.equal_parts(batch)
        tokens = parts[0].get("tokens", parts[0].get("input_ids"))
        if isinstance(tokens, Tensor) and plugin.custom_get_batch_function is None:
            shape = (tokens.shape[1], tokens.shape[0])
        elif args.seq_length is None:
            raise StateError(
                "The length of sequences of a batch without input_ids is not known. Pass MegatronLMPlugin(seq_length=...)."
            )
        else:
            shape = (int(args.seq_length), int(args.micro_batch_size))
        found = self.run_schedule(self.train_step_handler.forward_step, parts, shape, forward_only)
        means = {name: _mean([part[name] for part in found]) for name in found[0]} if found else None
        losses: dict[str, Tensor] = self._from_last(means)
        return losses

    @torch.no_grad()
    def megatron_generate(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        length_penalty: float | None = None,
    ) -> Tensor:
        """
        The tokens `inputs`, int64 of the shape (samples, length), with those that the model writes after them; all processes call it.

        `attention_mask` is 0 at padding on the right. The likeliest token is taken, or one is drawn with a `temperature`, `top_k` or
        `top_p`. A text has `max_length` tokens at most, or `max_new_tokens` after the longest beginning. `NotYetError` for beams.
        """
        if (num_beams or 1) > 1 or length_penalty is not None:
            raise NotYetError(
                "megatron_generate(num_beams=...) is not offered here yet. Leave num_beams and length_penalty out; temperature, top_k and "
                "top_p draw tokens."
            )
        if (max_length is None) == (max_new_tokens is None):
            raise ConfigurationError("megatron_generate takes one of max_length and max_new_tokens. Pass one of them.")
        lengths = torch.full((len(inputs),), inputs.shape[1]) if attention_mask is None else attention_mask.sum(dim=1)
        lengths = lengths.to(torch.cuda.current_device())
        longest = int(lengths.max()) + (max_new_tokens or 0) if max_length is None else max_length
        if self.config.sequence_parallel or len(self.chunks) > 1:
            raise NotYetError(
                "megatron_generate was called with sequence_parallelism=True or interleaved stages, whose parts a growing text does not "
                "divide into. Leave sequence_parallelism and num_layers_per_virtual_pipeline_stage out."
            )
        if longest > (positions := train_steps.get_args().max_position_embeddings):
            raise ConfigurationError(
                f"megatron_generate was asked for {longest} tokens, but the model has {positions} positions. Pass a smaller max_length or "
                "max_new_tokens."
            )
        was_training = self.training
        self.eval()
        try:
            return self._written(
                inputs, lengths, longest, partial(choose, temperature=temperature, top_k=top_k, top_p=top_p)
            )
        finally:
            self.train(was_training)

    def _written(self, inputs: Tensor, lengths: Tensor, longest: int, choose_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The tokens of `inputs` going on after `lengths` tokens each until all have `longest` or have ended; ends fill what comes after."""
        from megatron.core import parallel_state

        args = train_steps.get_args()
        group = parallel_state.get_model_parallel_group()
        end = args.eos_token_id
        fill = 0 if end is None else end
        tokens = torch.full((len(inputs), longest), fill, dtype=torch.long, device=torch.cuda.current_device())
        tokens[:, : inputs.shape[1]] = inputs[:, :longest]
        has_ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for position in range(int(lengths.min()), longest):
            # every token computes the whole of its text again
            chosen = choose_of(self._next_logits(tokens[:, :position])[:, : args.orig_vocab_size])
            # numbers that are drawn differ between processes
            dist.broadcast(chosen, dist.get_global_rank(group, 0), group)
            is_written = position >= lengths
            following = chosen.masked_fill(has_ended, fill)
            tokens[:, position] = torch.where(is_written, following, tokens[:, position])
            if end is not None:
                has_ended |= is_written & (chosen == end)
            if bool(has_ended.all()):
                return tokens[:, : position + 1]
        return tokens

    def _next_logits(self, tokens: Tensor) -> Tensor:
        """The logits of the token after these, of the shape (samples, words), on all processes of the model."""
        from megatron.core import tensor_parallel

        mask, _, positions = train_steps.left_to_right(tokens, end_of_document=None, pad=None)

        def last_logits(output: Tensor, **_: Any) -> Any:
            return tensor_parallel.gather_from_tensor_model_parallel_region(output[:, -1].float().contiguous())

        def forward_step(iterator: Iterator[Any], chunk: Module) -> tuple[Any, Callable[..., Any]]:
            return chunk(next(iterator), positions, mask), last_logits

        found = self.run_schedule(forward_step, [tokens], (tokens.shape[1], len(tokens)), True, collects=True)
        logits: Tensor = self._from_last(found[0] if found else None)
        return logits

    def log_eval_results(self) -> None:
        """Nothing: an `Accelerator`'s trackers log what is evaluated."""

    def save_checkpoint(self, output_dir: str | os.PathLike[str]) -> None:
        """Write what the training needs to go on: the same as `accelerator.save_state`."""
        self.accelerator.save_state(output_dir)

    def load_checkpoint(self, input_dir: str | os.PathLike[str]) -> None:
        """Go on from what `save_checkpoint` wrote."""
        self.accelerator.load_state(input_dir)


def _mean(values: list[Tensor]) -> Tensor:
    """The mean of the numbers of parts; of sums with their counts, over all copies; tensors of samples one after another."""
    first = values[0]
    if first.numel() == 1:
        return torch.stack([value.reshape(()) for value in values]).mean()
    if first.ndim == 1 and first.numel() == 2:
        total, count = train_steps.avg_losses_across_data_parallel_group(list(torch.stack(values).sum(dim=0)))
        mean: Tensor = total / count
        return mean
    return torch.cat(values)
