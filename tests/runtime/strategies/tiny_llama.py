"""A small model of transformers, and its training with nothing but PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def llama(*, tied: bool = False, heads: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches() -> torch.Tensor:
    return torch.randint(0, 32, (3, 4, 8), generator=torch.Generator().manual_seed(1))


def by_hand(tied: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, norms = llama(tied=tied), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in batches():
        model(input_ids=batch, labels=batch).loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms
