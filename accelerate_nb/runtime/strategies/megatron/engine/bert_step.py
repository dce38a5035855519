"""The step on a batch of a BERT, which predicts masked words."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional

from accelerate_nb.runtime.operations.nested import send_to_device
from accelerate_nb.runtime.strategies.megatron.engine.losses import avg_losses_across_data_parallel_group
from accelerate_nb.runtime.strategies.megatron.engine.train_steps import AbstractTrainStep

_KEYS = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask")


class BertTrainStep(AbstractTrainStep):
    """
    A step that predicts masked words (`labels`, -100 elsewhere), and which of two orders sentences have (`next_sentence_label`).

    Where a model gets labels of sequences, the loss is that of its number of labels.
    """

    def __init__(self, accelerator: Any, args: Namespace) -> None:
        super().__init__("BertTrainStep")
        self.num_labels = args.num_labels
        self.has_binary_head = args.bert_binary_head
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)
        if args.model_return_dict:
            from transformers.modeling_outputs import SequenceClassifierOutput

            self.model_output_class = SequenceClassifierOutput

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The plugin's function, or one that returns tokens, types, order of sentences, loss mask, labels and padding mask."""
        own = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        if own is not None:
            return own
        return _batch_of_megatron if megatron_dataset_flag else _batch_of_transformers

    def get_loss_func(self, accelerator: Any, pretraining_flag: bool = False, num_labels: int = 0) -> Any:
        """The plugin's function, or that of masked words, or of `num_labels` labels of sequences."""
        own = accelerator.state.megatron_lm_plugin.custom_loss_function
        if own is not None:
            return own
        return _loss_of_words if pretraining_flag else partial(_loss_of_labels, num_labels)

    def get_forward_step_func(self, pretraining_flag: bool = False, bert_binary_head: bool = False) -> Any:
        """The function of an iterator and a model."""

        def forward_step(data_iterator: Iterator[Any], model: Module) -> tuple[Any, Callable[..., Any]]:
            tokens, types, sentence_order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            types = types if bert_binary_head else None
            if not pretraining_flag:
                return model(tokens, padding_mask, tokentype_ids=types), partial(self.loss_func, labels)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, sentence_order)

        return forward_step


def _batch_of_megatron(data_iterator: Iterator[Any] | None) -> tuple[Any, ...]:
    from megatron.core import tensor_parallel

    data = None if data_iterator is None else next(data_iterator)
    found = tensor_parallel.broadcast_data(list(_KEYS), data, torch.int64)
    text, types, labels, is_random, loss_mask, padding_mask = (found[key] for key in _KEYS)
    return text, types, is_random, loss_mask.float(), labels, padding_mask


def _batch_of_transformers(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
    data = send_to_device(next(data_iterator), torch.cuda.current_device())
    tokens = data["input_ids"].long()
    padding_mask = data["attention_mask"].long() if "attention_mask" in data else torch.ones_like(tokens)
    labels = data["labels"].long() if "labels" in data else None
    loss_mask = None if labels is None else (labels != -100).float()
    types = data["token_type_ids"].long() if "token_type_ids" in data else torch.zeros_like(tokens)
    return tokens, types, data.get("next_sentence_label"), loss_mask, labels, padding_mask


def _loss_of_words(
    loss_mask: Tensor, sentence_order: Tensor | None, output_tensor: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    losses, order_logits = output_tensor
    mask = loss_mask.reshape(-1).float()
    of_words = (losses.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1.0)
    if order_logits is None or sentence_order is None:
        return of_words, {"lm loss": avg_losses_across_data_parallel_group([of_words])[0]}
    of_order = functional.cross_entropy(order_logits.view(-1, 2).float(), sentence_order.view(-1), ignore_index=-1)
    words, order = avg_losses_across_data_parallel_group([of_words, of_order])
    return of_words + of_order, {"lm loss": words, "sop loss": order}


def _loss_of_labels(num_labels: int, labels: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = logits.float()
    if num_labels == 1:
        loss = functional.mse_loss(logits.view(-1), labels.view(-1).float())
    elif labels.dtype in (torch.long, torch.int):
        loss = functional.cross_entropy(logits.view(-1, num_labels), labels.view(-1))
    else:
        loss = functional.binary_cross_entropy_with_logits(logits, labels.float())
    return loss, {"loss": avg_losses_across_data_parallel_group([loss])[0]}
