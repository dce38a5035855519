"""A model of megatron-core as a training loop calls it, and the engine where a call of the model makes a whole step on a batch."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleList, functional
from torch.utils._pytree import tree_leaves

from accelerate_nb.config.options.megatron import MegatronLMPlugin
from accelerate_nb.errors import ConfigurationError, DataError, NotYetError, StateError
from accelerate_nb.runtime.operations.collective import broadcast, gather, reduce
from accelerate_nb.runtime.operations.nested import recursively_apply, send_to_device
from accelerate_nb.runtime.strategies.base import Inputs, LossOf
from accelerate_nb.runtime.strategies.megatron.training import get_args
from accelerate_nb.runtime.strategies.pipeline.staged_model import batch_size, merged, microbatches, output_on_all
from accelerate_nb.runtime.training.unwrap import ModelWrapper
from accelerate_nb.runtime.world.world import DATA_AXES

# What `accelerate.utils.megatron_lm` offers.
__all__ = [
    "AbstractTrainStep", "GPTTrainStep", "MegatronEngine", "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups",
]  # fmt: skip


def innermost(chunk: Module) -> Module:
    """A part of a model inside of what is put around it, whether Megatron or a person does."""
    while isinstance(inner := getattr(chunk, "module", None), Module):
        chunk = inner
    return chunk


class MegatronModel(ModelWrapper):
    """This process's part of a model, with its consecutive `chunks`; a pipeline's output is the last stage's, on all processes."""

    def __init__(self, module: Module, chunks: Sequence[Module], microbatch_count: int) -> None:
        super().__init__(module)
        # in a list of Python's, no submodules, so that weights have one name each
        self.chunks: list[Any] = list(chunks)
        self.microbatch_count = microbatch_count

    @property
    def config(self) -> Any:
        """The `TransformerConfig` of the model."""
        return self.chunks[0].config

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's output; in a pipeline without a backward, since its gradients come by `Accelerator.train_step`."""
        stages = self.config.pipeline_model_parallel_size
        if stages == 1:
            return self.chunks[0](*arguments, **keywords)
        if torch.is_grad_enabled():
            raise StateError(
                "A model in stages was called with gradients. Call accelerator.train_step(model, ...), or it inside of torch.no_grad()."
            )
        # interleaved stages take no fewer parts than there are stages: each all of a batch that they do not divide
        count = stages if len(self.chunks) > 1 else 1
        inputs = (arguments, keywords)
        is_divided = batch_size(inputs) % count == 0
        parts = microbatches((inputs, None), count) if is_divided else [(inputs, None)] * count
        outputs = self._run(parts, None)
        kept = outputs if is_divided else outputs[:1]
        return self._from_last(merged(kept, [1] * len(kept)) if kept else None)

    def train_step(self, inputs: Inputs, targets: Any, loss_of: LossOf, *, steps: int) -> Tensor:
        """Forward and backward by Megatron's schedule, gradients divided by `steps`; the mean loss of the parts, on all stages."""
        # Megatron multiplies by the number of parts of a sequence, whose losses are means over a part here
        divisor = steps * self.config.context_parallel_size

        def scaled(output: Any, targets: Any) -> tuple[Tensor, Tensor]:
            loss = loss_of(output, targets)
            # a tensor of its own, which is divided in place afterwards
            return loss / divisor, loss.detach().float()

        losses = self._run(self.equal_parts((inputs, targets)), scaled)
        mean = self._from_last(torch.stack(losses).mean() if losses else None)
        found: Tensor = reduce(mean, "mean", axis="cp")
        return found

    def equal_parts(self, batch: Any) -> list[Any]:
        """The parts of a batch that Megatron's schedule brings through the model; `DataError` where they are not equal."""
        size = batch_size(batch)
        if size % self.microbatch_count:
            raise DataError(
                f"A batch of {size} samples was passed to Megatron with num_micro_batches={self.microbatch_count}, which does not divide it. "
                "Take another one, or a loader with drop_last=True."
            )
        return microbatches(batch, self.microbatch_count)

    def _run(self, parts: Sequence[tuple[Inputs, Any]], loss_of: Callable[..., tuple[Tensor, Any]] | None) -> list[Any]:
        """The outputs of parts on the last stage, or what is reported beside losses of outputs and targets, which go backwards."""
        leaves = (leaf for leaf in tree_leaves(parts[0][0]) if isinstance(leaf, Tensor) and leaf.ndim > 1)
        # without sequences there is no length, and no pipeline that asks for it
        shape = next((leaf.shape for leaf in leaves), (1, 1))

        def forward_step(
            iterator: Iterator[tuple[Inputs, Any]], chunk: Module
        ) -> tuple[Any, Callable[..., Any] | None]:
            (arguments, keywords), targets = next(iterator)
            return chunk(*arguments, **keywords), None if loss_of is None else partial(loss_of, targets=targets)

        return self.run_schedule(forward_step, parts, shape)

    def run_schedule(
        self, forward_step: Callable[[Any, Any], Any], parts: Sequence[Any], shape: Sequence[int]
    ) -> list[Any]:
        """Bring parts of a shape (samples, length) through the stages; what the last one reports of each, or its output without a loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        count = len(self.chunks)
        schedule = get_forward_backward_func(self.config.pipeline_model_parallel_size, count if count > 1 else None)
        found: list[Any] = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(parts) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(parts),
            seq_length=shape[1],
            micro_batch_size=shape[0],
            forward_only=not torch.is_grad_enabled(),
        )
        return found

    def _from_last(self, value: Any) -> Any:
        """The last stage's tensors, one or several in a dictionary, on all stages."""
        if self.config.pipeline_model_parallel_size == 1:
            return value
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        return output_on_all(value, last, group, torch.device(torch.cuda.current_device()))


def choose(logits: Tensor, *, temperature: float | None, top_k: int | None, top_p: float | None) -> Tensor:
    """A token of each row of `logits` (samples, words): the likeliest, or one that is drawn as temperature, top_k and top_p say."""
    if (temperature is None and not top_k and not top_p) or top_k == 1 or temperature == 0:
        return logits.argmax(dim=-1)
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    # top_p: among the likeliest that have so much of the probability together (Holtzman et al., https://arxiv.org/abs/1904.09751)
    temperature = temperature and float(temperature)
    settings = {TemperatureLogitsWarper: temperature, TopKLogitsWarper: top_k, TopPLogitsWarper: top_p}
    warpers: Any = LogitsProcessorList([warper(value) for warper, value in settings.items() if value])
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
        plugin: MegatronLMPlugin = accelerator.state.megatron_lm_plugin
        inner = [innermost(chunk) for chunk in model]
        super().__init__(inner[0] if len(inner) == 1 else ModuleList(inner), model, plugin.num_micro_batches)
        self.accelerator, self.args, self.plugin = accelerator, get_args(), plugin
        self.optimizer, self.scheduler = optimizer, scheduler
        if (own := plugin.custom_train_step_class) is not None:
            self.train_step_handler = own(self.args, **(plugin.custom_train_step_kwargs or {}))
        else:
            self.train_step_handler = GPTTrainStep(accelerator, self.args)
        self.iteration = 0
        accelerator.strategy.adopt(self)

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
        iterators = [iter(parts) for _ in self.chunks]
        return iterators if len(iterators) > 1 else iterators[0]

    def forward(self, *arguments: Any, **batch_data: Any) -> Any:
        """A step on a batch, or its evaluation: the loss, or an output of transformers that has it."""
        if arguments:
            raise ConfigurationError(
                "A model of Megatron's engine was called with positional arguments. Call it with a batch's tensors by name: model(**batch)."
            )
        if self.training:
            losses, _, _, _ = self.train_step(**batch_data)
            self.iteration += 1
            self.args.iteration = self.iteration
            self.args.consumed_train_samples += self.args.global_batch_size
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
                "Megatron's engine was called to train, but it has no optimizer. Give prepare both at once, or call model.eval() first."
            )
        step = self.accelerator.strategy.step_of(self.optimizer)
        step.zero_grad()
        losses = self._losses(batch_data)
        self.optimizer.skipped_iter = is_skipped = not step.step()
        if self.scheduler is not None and not is_skipped:
            self.scheduler.step(increment=self.args.global_batch_size)
        return losses, int(is_skipped), step.last_norm, None

    def eval_step(self, **batch_data: Any) -> dict[str, Tensor]:
        """The losses of a batch by name, on all processes, without gradients."""
        with torch.no_grad():
            losses = self._losses(batch_data)
        self.args.consumed_valid_samples += self.args.global_batch_size
        return losses

    def _losses(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        parts = self.equal_parts(batch)
        shape = (int(self.args.micro_batch_size), int(self.args.seq_length))
        tokens = parts[0].get("tokens", parts[0].get("input_ids"))
        if isinstance(tokens, Tensor) and self.plugin.custom_get_batch_function is None:
            shape = (tokens.shape[0], tokens.shape[1])
        found = self.run_schedule(self.train_step_handler.forward_step, parts, shape)
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
        refused = {
            "num_beams or length_penalty": (num_beams or 1) > 1 or length_penalty is not None,
            "sequence_parallelism=True": self.config.sequence_parallel,
            "interleaved stages": len(self.chunks) > 1,
        }
        if names := [name for name, is_found in refused.items() if is_found]:
            raise NotYetError(
                f"megatron_generate was called with {' and '.join(names)}, which it does not offer. Leave them out."
            )
        if (max_length is None) == (max_new_tokens is None):
            raise ConfigurationError("megatron_generate takes one of max_length and max_new_tokens. Pass one of them.")
        lengths = torch.full((len(inputs),), inputs.shape[1]) if attention_mask is None else attention_mask.sum(dim=1)
        longest = int(lengths.max()) + (max_new_tokens or 0) if max_length is None else max_length
        if longest > (positions := self.args.max_position_embeddings):
            raise ConfigurationError(
                f"megatron_generate was asked for {longest} tokens, but the model has {positions} positions. Take a smaller length."
            )
        was_training = self.training
        self.eval()
        try:
            choose_of = partial(choose, temperature=temperature, top_k=top_k, top_p=top_p)
            return self._written(inputs, lengths.to(torch.cuda.current_device()), longest, choose_of)
        finally:
            self.train(was_training)

    def _written(self, inputs: Tensor, lengths: Tensor, longest: int, choose_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The tokens of `inputs` going on after `lengths` tokens each until all have `longest` or have ended; ends fill what comes after."""
        from megatron.core import tensor_parallel

        end = self.args.eos_token_id
        fill = 0 if end is None else end
        tokens = torch.full((len(inputs), longest), fill, device=lengths.device)
        tokens[:, : inputs.shape[1]] = inputs[:, :longest]
        has_ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for position in range(int(lengths.min()), longest):
            # every token computes the whole of its text again
            text = tokens[:, :position]
            mask, _, positions = left_to_right(text)
            outputs = self._run([(((text, positions, mask), {}), None)], None)
            last = [output[:, -1].float().contiguous() for output in outputs]
            logits = self._from_last(
                tensor_parallel.gather_from_tensor_model_parallel_region(last[0]) if last else None
            )
            # numbers that are drawn differ between processes
            chosen = broadcast(choose_of(logits[:, : self.args.orig_vocab_size]), axis=("pp", "tp"))
            is_written = position >= lengths
            tokens[:, position] = chosen.masked_fill(has_ended, fill).where(is_written, tokens[:, position])
            if end is not None:
                has_ended |= is_written & (chosen == end)
            if bool(has_ended.all()):
                return tokens[:, : position + 1]
        return tokens

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
        total, count = avg_losses_across_data_parallel_group(list(torch.stack(values).sum(dim=0)))
        mean: Tensor = total / count
        return mean
    return torch.cat(values)


def avg_losses_across_data_parallel_group(losses: list[Tensor]) -> Tensor:
    """The means of losses (each a number) over the copies of a model, one tensor of the shape `(len(losses),)`, without a graph."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    summed = torch.stack([loss.detach().reshape(()) for loss in losses])
    dist.all_reduce(summed, group=group)
    return summed.div_(float(group.size()))


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of all copies of a model, joined along dimension 0; nested in lists, tuples or mappings."""
    return gather(recursively_apply(torch.atleast_1d, tensor), axis=DATA_AXES)


def left_to_right(
    tokens: Tensor,
    *,
    end_of_document: int | None = None,
    pad: int | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    masks_ends: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention mask (true hides), loss mask in float32 and positions of `tokens` (samples, length)."""
    # as Megatron-LM's get_ltor_masks_and_position_ids
    samples, length = tokens.shape
    sees = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None]
    positions = torch.arange(length, device=tokens.device).expand(samples, length).clone()
    loss_mask = torch.ones(samples, length, dtype=torch.float32, device=tokens.device)
    for ignored in (pad, end_of_document if masks_ends else None):
        if ignored is not None:
            loss_mask[tokens == ignored] = 0.0
    if end_of_document is not None and (reset_position_ids or reset_attention_mask):
        # an end belongs to the document that it ends
        ends = (tokens == end_of_document).long()
        documents = ends.cumsum(1) - ends
        if reset_attention_mask:
            sees = sees & (documents[:, :, None] == documents[:, None, :])
        if reset_position_ids:
            is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) > 0
            positions = positions - torch.where(is_first, positions, 0).cummax(1).values
    return ~sees[:, None], loss_mask, positions


class AbstractTrainStep:
    """
    The step of an engine on one part of a batch: how it is read, brought through the model, and what its loss is.

    A class of yours sets `get_batch`, `loss_func`, `forward_step(data_iterator, model)` and `model_output_class` (or `None`).
    """

    model_output_class: Any = None
    forward_step: Callable[..., Any]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The function that reads a part of a batch from an iterator."""

    def get_forward_step_func(self) -> Any:
        """The function of an iterator and a model that returns the output, and the function of the output that is the loss."""

    def get_loss_func(self, accelerator: Any) -> Any:
        """The function that returns a loss, and the numbers to report, by name."""


class GPTTrainStep(AbstractTrainStep):
    """A step that predicts each next token; the loss is the mean over the tokens that are no padding."""

    def __init__(self, accelerator: Any, args: Namespace) -> None:
        super().__init__("GPTTrainStep")
        self.eod_token = self.pad_token = args.eos_token_id
        self.reset_position_ids = args.reset_position_ids
        self.reset_attention_mask = args.reset_attention_mask
        self.eod_mask_loss = args.eod_mask_loss
        self.return_logits = args.return_logits
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        if args.model_return_dict:
            from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

            self.model_output_class = CausalLMOutputWithCrossAttentions

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The plugin's function, or one that returns tokens, labels, loss mask, attention mask and positions."""
        usual = self._batch_of_megatron if megatron_dataset_flag else self._batch_of_transformers
        return accelerator.state.megatron_lm_plugin.custom_get_batch_function or usual

    def _batch_of_megatron(self, data_iterator: Iterator[Any]) -> tuple[Tensor, ...]:
        """A part of a batch of a data set of Megatron's: sequences that are one token longer, or tokens and labels."""
        batch = send_to_device(next(data_iterator), torch.cuda.current_device())
        if "text" in batch:
            return self._with_masks(batch["text"].long())
        tokens, labels = batch["tokens"].long(), batch["labels"].long()
        mask, _, _ = left_to_right(tokens)
        return tokens, labels, batch["loss_mask"].float(), batch.get("attention_mask", mask), batch["position_ids"]

    def _batch_of_transformers(self, data_iterator: Iterator[Any]) -> tuple[Tensor, ...]:
        """A part of a batch of `input_ids`, with labels that are the next token each, the end of a text after the last."""
        tokens = send_to_device(next(data_iterator)["input_ids"], torch.cuda.current_device()).long()
        batch = self._with_masks(functional.pad(tokens, (0, 1), value=self.eod_token or 0))
        if self.eod_token is None:
            # nothing follows the last token
            batch[2][:, -1] = 0.0
        return batch

    def _with_masks(self, sequences: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        tokens, labels = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
        attention_mask, loss_mask, position_ids = left_to_right(
            tokens,
            end_of_document=self.eod_token,
            pad=self.pad_token,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            masks_ends=self.eod_mask_loss,
        )
        return tokens, labels, loss_mask, attention_mask, position_ids

    def get_loss_func(self, accelerator: Any) -> Any:
        """The plugin's function, or one of the loss mask and the output: losses of tokens, with logits where they are requested."""
        return accelerator.state.megatron_lm_plugin.custom_loss_function or self._loss

    def _loss(self, loss_mask: Tensor, output_tensor: Any) -> tuple[Tensor, dict[str, Tensor]]:
        losses, logits = output_tensor if self.return_logits else (output_tensor, None)
        mask = loss_mask.reshape(-1).float()
        loss = (losses.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1.0)
        if get_args().check_for_nan_in_loss_and_grad and loss.isnan():
            raise StateError(
                "The loss of a step is NaN. Lower the learning rate, or leave check_for_nan_in_loss_and_grad out to go on."
            )
        reported = {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}
        return loss, reported if logits is None else {**reported, "logits": logits.detach()}

    def get_forward_step_func(self) -> Any:
        """The function of an iterator and a model."""
        return self._forward

    def _forward(self, data_iterator: Any, model: Module) -> tuple[Any, Callable[..., Any]]:
        tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
        if not self.return_logits:
            return model(tokens, position_ids, attention_mask, labels=labels), partial(self.loss_func, loss_mask)
        from megatron.core import tensor_parallel

        output = model(tokens, position_ids, attention_mask)
        inner: Any = innermost(model)
        if inner.post_process:
            losses = inner.compute_language_model_loss(labels, output.transpose(0, 1).contiguous())
            output = losses, tensor_parallel.gather_from_tensor_model_parallel_region(output.detach())
        return output, partial(self.loss_func, loss_mask)
