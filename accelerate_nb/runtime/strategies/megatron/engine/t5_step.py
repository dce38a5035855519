"""The step on a batch of a T5, which reads one text and writes another."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.runtime.operations.nested import send_to_device
from accelerate_nb.runtime.strategies.megatron.engine.losses import avg_losses_across_data_parallel_group
from accelerate_nb.runtime.strategies.megatron.engine.train_steps import AbstractTrainStep

_KEYS = ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask", "enc_dec_mask")


class T5TrainStep(AbstractTrainStep):
    """A step that writes `labels`, -100 where nothing is written, after it has read `input_ids`."""

    def __init__(self, accelerator: Any, args: Namespace) -> None:
        super().__init__("T5TrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        if args.model_return_dict:
            from transformers.modeling_outputs import Seq2SeqLMOutput

            self.model_output_class = Seq2SeqLMOutput

    @staticmethod
    def attn_mask_postprocess(attention_mask: Tensor) -> Tensor:
        """Where nothing is attended to, of the shape (samples, length, length); `attention_mask` is 1 at tokens, (samples, length)."""
        return attention_mask[:, None, :] * attention_mask[:, :, None] < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: Any) -> Tensor:
        """Where a text that is written sees nothing, of the shape (1, length, length): what comes later."""
        return torch.ones(1, seq_length, seq_length, device=device).tril() < 0.5

    @staticmethod
    def get_enc_dec_mask(attention_mask: Tensor, dec_seq_length: int, device: Any) -> Tensor:
        """Where nothing of the text that is read is attended to, of the shape (samples, length written, length read)."""
        return (attention_mask.to(device)[:, None, :] < 0.5).expand(-1, dec_seq_length, -1)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The plugin's function, or one that returns both texts, the loss mask, labels and three masks of attention."""
        own = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        if own is not None:
            return own
        return _batch_of_megatron if megatron_dataset_flag else _batch_of_transformers

    def get_loss_func(self, accelerator: Any) -> Any:
        """The plugin's function, or the mean over tokens that are written."""
        own = accelerator.state.megatron_lm_plugin.custom_loss_function
        return _loss if own is None else own

    def get_forward_step_func(self) -> Any:
        """The function of an iterator and a model."""

        def forward_step(data_iterator: Iterator[Any], model: Module) -> tuple[Any, Callable[..., Any]]:
            read, written, loss_mask, labels, *masks = self.get_batch(data_iterator)
            # one mask for all heads
            output = model(read, written, *[mask[:, None] for mask in masks], lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


def _batch_of_megatron(data_iterator: Iterator[Any] | None) -> tuple[Tensor, ...]:
    from megatron.core import tensor_parallel

    data = None if data_iterator is None else next(data_iterator)
    found = tensor_parallel.broadcast_data(list(_KEYS), data, torch.int64)
    read, written, labels, loss_mask, *masks = (found[key] for key in _KEYS)
    return read, written, loss_mask.float(), labels, *[mask < 0.5 for mask in masks]


def _batch_of_transformers(data_iterator: Iterator[Any]) -> tuple[Tensor, ...]:
    data = send_to_device(next(data_iterator), torch.cuda.current_device())
    read, labels = data["input_ids"].long(), data["labels"].long()
    is_read = data["attention_mask"].long() if "attention_mask" in data else torch.ones_like(read)
    if "decoder_input_ids" in data:
        written = data["decoder_input_ids"].long()
    else:
        # a text begins with padding, which is 0
        written = torch.nn.functional.pad(labels[:, :-1], (1, 0))
        written = written.masked_fill(written == -100, 0)
    length = written.shape[1]
    masks = (
        T5TrainStep.attn_mask_postprocess(is_read),
        T5TrainStep.get_decoder_mask(length, written.device).expand(len(written), -1, -1),
        T5TrainStep.get_enc_dec_mask(is_read, length, written.device),
    )
    return read, written, (labels != -100).float(), labels, *masks


def _loss(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mask = loss_mask.reshape(-1)
    loss = (output_tensor.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1.0)
    return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}
