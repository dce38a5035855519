"""Tokens a second of a 124 M-parameter GPT in bf16 on one GPU: hand-written, ours and Hugging Face Accelerate in turns."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.bench.rows import Row, compared, finish, in_turns, main, on_gpus_or_tiny, timed

Epoch = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """The size of a GPT and of its batches; the default is GPT-2's smallest, 124 M parameters."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304  # GPT-2's 50257, rounded up to what matrix units like
    context: int = 1024
    batch: int = 16
    steps: int = 20


TINY = Shape(layers=2, heads=2, width=32, vocabulary=256, context=32, batch=4, steps=3)


class Block(nn.Module):
    """Attention, then two linear layers, each added to what came in (pre-norm, as GPT-2)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.attend = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        self.before_layers = nn.LayerNorm(shape.width)
        self.layers = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.attend(self.before_attention(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.layers(self.before_layers(hidden))


class GPT(nn.Module):
    """A decoder whose last layer shares its weights with the embedding; `(batch, length)` tokens to a scalar loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.last = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.last(self.blocks(self.tokens(tokens) + self.places(places)))
        scores = self.head(hidden[:, :-1])
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), tokens[:, 1:].reshape(-1))


def measure(shape: Shape, rounds: int, seconds: float = math.inf) -> list[Row]:
    """The speed of each loop, in turns, of which a third or later one begins no more after so many seconds."""
    until = time.monotonic() + seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loops: dict[str, Epoch] = {
        "hand-written": hand_written(shape, device),
        "accelerate_nb": prepared("accelerate_nb", shape, device),
        "Accelerate": prepared("accelerate", shape, device),
    }
    for epoch in loops.values():
        epoch()
    ways = {name: partial(timed, epoch, before=finish, after=finish) for name, epoch in loops.items()}
    taken = in_turns(ways, rounds, until=until)
    tokens = shape.steps * shape.batch * shape.context
    speeds = {name: [tokens / seconds for seconds in times] for name, times in taken.items()}
    return compared(speeds, "hand-written", "tokens/s", "a GPT in bf16: {}")


def parts(shape: Shape) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = GPT(shape)
    if torch.cuda.is_available():
        model.cuda()
    data = TensorDataset(torch.randint(shape.vocabulary, (shape.steps * shape.batch, shape.context)))
    fused = torch.cuda.is_available()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    return model, optimizer, DataLoader(data, batch_size=shape.batch, pin_memory=fused)


def hand_written(shape: Shape, device: torch.device) -> Epoch:
    model, optimizer, loader = parts(shape)

    def epoch() -> None:
        for (tokens,) in loader:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(tokens.to(device, non_blocking=True))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def prepared(name: str, shape: Shape, device: torch.device) -> Epoch:
    package = import_module(name)
    config = package.DataLoaderConfiguration(non_blocking=True)
    cpu = device.type == "cpu"
    accelerator = package.Accelerator(mixed_precision="bf16", dataloader_config=config, cpu=cpu)
    model, optimizer, loader = accelerator.prepare(*parts(shape))

    def epoch() -> None:
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(tokens))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return epoch


if __name__ == "__main__":
    main(
        partial(on_gpus_or_tiny, lambda given: measure(TINY if given.tiny else Shape(), given.rounds)),
        *(__doc__, 6),
        decimals=0,
        tiny={"action": "store_true", "help": "a tiny model on whatever device there is"},
    )
