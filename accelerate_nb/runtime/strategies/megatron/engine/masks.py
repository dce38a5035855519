"""Masks and positions of tokens that are read from left to right."""

from __future__ import annotations

import torch
from torch import Tensor


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
