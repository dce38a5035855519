"""Models that have nothing but the configuration of one of transformers, which takes seconds to import."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Linear, Module, functional

from tests.scale.megatron.gpt import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, batches

END, PARTS = 0, 2


class Described(Linear):
    def __init__(self, **config: Any) -> None:
        super().__init__(1, 1)
        self.config = SimpleNamespace(return_dict=False, vocab_size=VOCABULARY, initializer_range=0.02, **config)


def gpt2(**changes: Any) -> Described:
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH, "n_inner": None}
    described = {
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "eos_token_id": END,
        "add_cross_attention": False,
        **dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.1),
    }
    return Described(model_type="gpt2", **{**sizes, **described, **changes})


def llama() -> Described:
    sizes = {"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH}
    return Described(
        model_type="llama",
        num_key_value_heads=2,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        mlp_bias=False,
        attention_bias=False,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        eos_token_id=END,
        **sizes,
    )


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
