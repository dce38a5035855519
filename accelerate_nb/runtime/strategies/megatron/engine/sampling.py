"""The choice of a next token."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(logits: Tensor, *, temperature: float | None, top_k: int | None, top_p: float | None) -> Tensor:
    """
    A token for each row of `logits`, of the shape (samples, words): the likeliest, or one that is drawn.

    One is drawn where `temperature`, `top_k` or `top_p` is given: among the `top_k` likeliest, or among the likeliest that have
    `top_p` of the probability together (Holtzman et al., https://arxiv.org/abs/1904.09751).

    >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), temperature=None, top_k=None, top_p=None)
    tensor([1])
    """
    if (temperature is None and not top_k and not top_p) or top_k == 1 or temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / (1.0 if temperature is None else temperature)
    ordered, order = logits.sort(dim=-1, descending=True)
    if top_k:
        ordered[:, top_k:] = float("-inf")
    if top_p:
        probabilities = ordered.softmax(dim=-1)
        # what the likelier ones have together
        ordered = ordered.masked_fill(probabilities.cumsum(dim=-1) - probabilities >= top_p, float("-inf"))
    drawn = torch.multinomial(ordered.softmax(dim=-1), 1)
    return order.gather(1, drawn).squeeze(1)
