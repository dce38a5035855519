"""Layers for cut sequences that a CPU can compute; those of Megatron's own are of Transformer Engine or Apex, which need a GPU."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class SequenceNorm(nn.LayerNorm):
    """A norm of a part of each sequence; Megatron sums up the gradients of weights with such a mark along a layer's width."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for weight in self.parameters():
            weight.sequence_parallel = config.sequence_parallel


class GatheredAttention(nn.Module):
    """Attention from a part of each sequence to all of it, whose keys and values come from the other processes."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        key, value = (gather_from_sequence_parallel_region(part, group=group) for part in (key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask.logical_not())
        return attended.permute(2, 0, 1, 3).flatten(2)


def layers_for_cut_sequences(config: Any) -> Any:
    """The specification of a GPT's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec = get_gpt_layer_local_spec(config.num_moe_experts)
    attention = replace(
        spec.submodules.self_attention,
        submodules=replace(spec.submodules.self_attention.submodules, core_attention=GatheredAttention),
    )
    layer = replace(
        spec,
        submodules=replace(
            spec.submodules, input_layernorm=SequenceNorm, pre_mlp_layernorm=SequenceNorm, self_attention=attention
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=SequenceNorm)
