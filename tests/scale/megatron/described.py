"""Models that have nothing but the configuration of one of transformers."""

from typing import Any

import torch
from torch.nn import Linear, Module, functional

from tests.scale.megatron.gpt import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, batches

END, PARTS = 0, 2


def described(config: Any) -> Linear:
    model = Linear(1, 1)
    model.config = config
    return model


def gpt2() -> Linear:
    from transformers import GPT2Config

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return described(GPT2Config(**sizes, activation_function="gelu", eos_token_id=END, return_dict=False))


def llama() -> Linear:
    from transformers import LlamaConfig

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "vocab_size": VOCABULARY,
    }
    return described(LlamaConfig(**sizes, eos_token_id=END, return_dict=False))


def samples(tokens: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row} for row in tokens]


def tokens() -> torch.Tensor:
    return torch.cat([batch[:, :LENGTH] for batch in batches()])


def loss_of_parts(model: Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean of the losses of equal parts, each a mean over tokens that are no padding."""
    losses = []
    for part in batch.chunk(PARTS):
        wanted = functional.pad(part[:, 1:], (0, 1), value=END)
        of_tokens = functional.cross_entropy(model(part).transpose(1, 2), wanted, reduction="none")
        mask = (part != END).float()
        losses.append((of_tokens * mask).sum() / mask.sum())
    return torch.stack(losses).mean()
