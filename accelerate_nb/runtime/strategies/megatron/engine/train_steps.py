"""The step on a batch of tokens that are read from left to right, the base of such steps, and losses of copies."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.operations.nested import send_to_device, tensors_of, with_leaves
from accelerate_nb.runtime.strategies.megatron.engine.arguments import get_args


def avg_losses_across_data_parallel_group(losses: list[Tensor]) -> Tensor:
    """The means of losses (each a number) over the copies of a model, one tensor of the shape `(len(losses),)`, without a graph."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    summed = torch.stack([loss.detach().reshape(()).clone() for loss in losses])
    dist.all_reduce(summed, group=group)
    return summed.div_(float(group.size()))


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of all copies of a model, joined along dimension 0; nested in lists, tuples or mappings."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()

    def gathered(item: Tensor) -> Tensor:
        own = (item[None] if item.ndim == 0 else item).contiguous()
        found = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(found, own, group=group)
        return torch.cat(found)

    return with_leaves(tensor, map(gathered, tensors_of("gather", tensor)))


def left_to_right(
    tokens: Tensor,
    *,
    end_of_document: int | None,
    pad: int | None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    masks_ends: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    The attention mask, the loss mask and the positions of `tokens`, of the shape (samples, length).

    The attention mask is true where nothing is attended to, of the shape (1 or samples, 1, length, length); the loss mask, float32, is
    0 at padding, and at ends of documents with `masks_ends`. Documents in a sample see nothing of each other with
    `reset_attention_mask`, and are counted from 0 with `reset_position_ids`. As Megatron-LM's `get_ltor_masks_and_position_ids`.
    """
    samples, length = tokens.shape
    sees = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None]
    positions = torch.arange(length, device=tokens.device).expand(samples, length).clone()
    loss_mask = torch.ones(samples, length, dtype=torch.float32, device=tokens.device)
    if pad is not None:
        loss_mask[tokens == pad] = 0.0
    if masks_ends and end_of_document is not None:
        loss_mask[tokens == end_of_document] = 0.0
    if end_of_document is not None and (reset_position_ids or reset_attention_mask):
        # an end belongs to the document that it ends
        ends = (tokens == end_of_document).long()
        documents = ends.cumsum(1) - ends
        if reset_attention_mask:
            sees = sees & (documents[:, :, None] == documents[:, None, :])
        if reset_position_ids:
            is_first = torch.ones_like(ends, dtype=torch.bool)
            is_first[:, 1:] = ends[:, :-1].bool()
            starts = torch.where(is_first, positions, 0).cummax(1).values
            positions = positions - starts
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
        self.eod_token = args.eos_token_id
        self.pad_token = args.eos_token_id
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
        own = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        if own is not None:
            return own
        return self._batch_of_megatron if megatron_dataset_flag else self._batch_of_transformers

    def _batch_of_megatron(self, data_iterator: Iterator[Any] | None) -> tuple[Tensor, ...]:
        """A part of a batch of a data set of Megatron's: sequences that are one token longer, or tokens and labels."""
        data = None if data_iterator is None else next(data_iterator)
        if data is not None and "text" not in data:
            batch = send_to_device(data, torch.cuda.current_device())
            tokens, labels = batch["tokens"].long(), batch["labels"].long()
            mask, _, _ = left_to_right(tokens, end_of_document=None, pad=None)
            return tokens, labels, batch["loss_mask"].float(), batch.get("attention_mask", mask), batch["position_ids"]
        from megatron.core import tensor_parallel

        found = tensor_parallel.broadcast_data(["text"], data, torch.int64)["text"].long()
        return self._with_masks(found)

    def _batch_of_transformers(self, data_iterator: Iterator[Any]) -> tuple[Tensor, ...]:
        """A part of a batch of `input_ids`, with labels that are the next token each, the end of a text after the last."""
        tokens = send_to_device(next(data_iterator)["input_ids"], torch.cuda.current_device()).long()
        if self.eod_token is None:
            batch = self._with_masks(torch.cat([tokens, tokens[:, -1:]], dim=1))
            # nothing follows the last token
            batch[2][:, -1] = 0.0
            return batch
        return self._with_masks(torch.nn.functional.pad(tokens, (0, 1), value=self.eod_token))

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
        own = accelerator.state.megatron_lm_plugin.custom_loss_function
        return self._loss if own is None else own

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
        return self._forward_with_logits if self.return_logits else self._forward

    def _forward(self, data_iterator: Any, model: Module) -> tuple[Any, Callable[..., Any]]:
        tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
        output = model(tokens, position_ids, attention_mask, labels=labels)
        return output, partial(self.loss_func, loss_mask)

    def _forward_with_logits(self, data_iterator: Any, model: Module) -> tuple[Any, Callable[..., Any]]:
        from megatron.core import tensor_parallel
        from megatron.core.utils import unwrap_model

        tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
        output = model(tokens, position_ids, attention_mask)
        inner: Any = unwrap_model(model)
        if inner.post_process:
            losses = inner.compute_language_model_loss(labels, output.transpose(0, 1).contiguous())
            output = losses, tensor_parallel.gather_from_tensor_model_parallel_region(output.detach())
        return output, partial(self.loss_func, loss_mask)
