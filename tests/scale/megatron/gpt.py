"""A GPT in plain PyTorch, and one of megatron-core that has the same weights."""

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerate_nb.errors import AccelerateNbError

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 16, 32, 4, 4
EXPERTS = 4
BATCH, BATCHES = 8, 4


class ExpertLayer(nn.Module):
    """A linear layer of each expert, on the inputs of each."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, outputs, inputs) * 0.2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, outputs) * 0.2)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.einsum("...ei,eoi->...eo", hidden, self.weight) + self.bias


class Experts(nn.Module):
    """A perceptron of several, of which two compute for a token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.expert_up, self.expert_down = ExpertLayer(WIDTH, 4 * WIDTH), ExpertLayer(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        chosen, experts = self.router(hidden).topk(2)
        shares = torch.zeros(*hidden.shape[:-1], EXPERTS).scatter(-1, experts, chosen.softmax(-1))
        repeated = hidden.unsqueeze(-2).expand(*hidden.shape[:-1], EXPERTS, WIDTH)
        outputs = self.expert_down(functional.gelu(self.expert_up(repeated)))
        return (outputs * shares.unsqueeze(-1)).sum(-2)


class Block(nn.Module):
    """Attention and a perceptron, each after a norm; keys and values stand beside their head's queries, as Megatron has them."""

    def __init__(self, has_experts: bool = False) -> None:
        super().__init__()
        self.input_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if has_experts:
            self.mlp: nn.Module = Experts()
        else:
            layers = {"up": nn.Linear(WIDTH, 4 * WIDTH), "gelu": nn.GELU(), "down": nn.Linear(4 * WIDTH, WIDTH)}
            self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, _ = hidden.shape
        qkv = self.qkv(self.input_norm(hidden)).view(samples, length, HEADS, 3, WIDTH // HEADS)
        query, key, value = (qkv[:, :, :, index].transpose(1, 2) for index in range(3))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        return hidden + self.mlp(self.norm(hidden))


class PlainGPT(nn.Module):
    def __init__(self, tied: bool = False, has_experts: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(has_experts) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def plain_gpt(tied: bool = False, has_experts: bool = False) -> PlainGPT:
    torch.manual_seed(3)
    return PlainGPT(tied, has_experts)


# Names of the plain model, and of Megatron's.
NAMES = {
    "words": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "blocks": "decoder.layers",
    "input_norm": "self_attention.linear_qkv.layer_norm",
    "qkv": "self_attention.linear_qkv",
    "projection": "self_attention.linear_proj",
    "norm": "mlp.linear_fc1.layer_norm",
    "up": "linear_fc1",
    "down": "linear_fc2",
    "expert_up": "experts.experts.linear_fc1",
    "expert_down": "experts.experts.linear_fc2",
    "head": "output_layer",
}


def by_megatrons_names(state: dict[str, Tensor], tied: bool = False) -> dict[str, Tensor]:
    def name_of(name: str) -> str:
        if name.startswith("norm."):
            return f"decoder.final_layernorm.{name.partition('.')[2]}"
        found = ".".join(NAMES.get(part, part) for part in name.split("."))
        # a norm before a layer is that layer's
        return found.replace("norm.weight", "norm_weight").replace("norm.bias", "norm_bias")

    return {name_of(name): value for name, value in state.items() if not (tied and name.startswith("head."))}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(BATCHES)]


def plain_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


def train_plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss_of: Callable[[Any, Tensor], Tensor] = plain_loss,
    data: Sequence[Tensor] | None = None,
    clip: float = 0.5,
    steps: int = 1,
    rates: Sequence[float] = (),
) -> dict[str, list[float]]:
    """The losses and norms of a training by hand, on one process; `rates` are those in force after each step."""
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    for number, batch in enumerate(batches() if data is None else data, 1):
        loss = loss_of(model, batch)
        (loss / steps).backward()
        found["losses"].append(loss.item())
        if number % steps:
            continue
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups if rates else ():
            group["lr"] = rates[number - 1]
    return found


def transformer_config(mesh: Any, **settings: Any) -> Any:
    """The configuration of the GPT for the degrees of a mesh."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fusions = ("bias_activation", "masked_softmax", "bias_dropout", "gradient_accumulation", "apply_rope")
    known = {
        **{f"{name}_fusion": False for name in fusions},
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "context_parallel_size": mesh.cp,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**known, **settings})


def megatron_gpt(config: Any, *, tied: bool = False, layer_spec: Any = None) -> Any:
    """This process's part of the GPT, or the list of its parts where stages are interleaved."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage

    count = config.virtual_pipeline_model_parallel_size
    parts = [
        GPTModel(
            config=config,
            transformer_layer_spec=layer_spec or get_gpt_layer_local_spec(config.num_moe_experts),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage() and is_vp_first_stage(stage, count),
            post_process=parallel_state.is_pipeline_last_stage() and is_vp_last_stage(stage, count),
            share_embeddings_and_output_weights=tied,
            vp_stage=stage,
        )
        for stage in ([None] if count is None else range(count))
    ]
    return parts[0] if count is None else nn.ModuleList(parts)


def megatron_inputs(batch: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    """Tokens, positions and the mask of what is not attended to, with labels."""
    samples, length = batch.shape[0], batch.shape[1] - 1
    mask = torch.tril(torch.ones(length, length)).logical_not().expand(samples, 1, length, length)
    positions = torch.arange(length).expand(samples, length)
    return (batch[:, :-1].contiguous(), positions, mask), {"labels": batch[:, 1:].contiguous()}


def own_inputs(accelerator: Any, batch: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The inputs of this process's copy of the model; in contexts its part of tokens, positions and labels, and the mask's rows for them."""
    from megatron.core import parallel_state

    replica, replicas = accelerator.strategy.data_replicas
    count, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()

    def own(tensor: Tensor) -> Tensor:
        return tensor.chunk(count, 2 if tensor.dim() == 4 else 1)[rank].contiguous()

    inputs, keywords = megatron_inputs(batch.chunk(replicas)[replica])
    return tuple(map(own, inputs)), {name: own(tensor) for name, tensor in keywords.items()}


def step_on(accelerator: Any, model: Any, batch: Tensor) -> Tensor:
    """The loss of this process's part of a batch, whose gradients are computed."""
    inputs, keywords = own_inputs(accelerator, batch)
    loss: Tensor = accelerator.train_step(model, *inputs, loss_fn=torch.mean, **keywords)
    return loss


def train(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    data: Sequence[Tensor],
    *,
    clip: float = 0.5,
    by_backward: bool = False,
) -> dict[str, list[float]]:
    """The losses and norms of a training on this rank."""
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    for batch in data:
        with accelerator.accumulate(model):
            if by_backward:
                inputs, keywords = own_inputs(accelerator, batch)
                loss = model(*inputs, **keywords).mean()
                accelerator.backward(loss)
            else:
                loss = step_on(accelerator, model, batch)
            found["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
    return found


def assert_refused(text: str, call: Callable[[], Any], error: type[AccelerateNbError] = AccelerateNbError) -> None:
    """A call raises this error of ours, whose message has the text."""
    with pytest.raises(error, match=re.escape(text)):
        call()


def assert_weights(found: dict[str, Tensor], wanted: dict[str, Tensor], rounding: float) -> None:
    """All weights are those of another training."""
    assert wanted
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        torch.testing.assert_close(
            found[name], weight, rtol=0, atol=rounding, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal(found: Sequence[dict[str, Any]], wanted: dict[str, Any], rounding: float = 1e-5) -> None:
    """Losses and norms on all ranks, and the complete weights on the first one, are those of another training."""
    assert_weights(found[0]["state"], wanted["state"], rounding)
    for outcome in found:
        for name in ("losses", "norms"):
            assert outcome[name] == pytest.approx(wanted[name], abs=rounding), name
