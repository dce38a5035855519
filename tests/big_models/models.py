"""Models that tests of big models place, load and run."""

import torch
from torch import nn

from accelerate_nb import init_empty_weights


class Small(nn.Module):
    """A linear layer, a batch norm with buffers, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x):
        return self.linear2(self.batchnorm(self.linear1(x)))


class Block(nn.Module):
    """A residual block with a parameter and a buffer of its own beside its layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("shift", torch.arange(size, dtype=torch.float32))

    def forward(self, x, *, extra=None):
        y = self.down(torch.relu(self.up(x))) * self.scale + self.shift
        return x + y if extra is None else x + y + extra


class Deep(nn.Module):
    """Nested sequences of blocks, with a parameter and a buffer at the top."""

    def __init__(self, size: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((size,), 1.5))
        self.register_buffer("mask", torch.ones(size))
        self.register_buffer("step", torch.tensor(3), persistent=False)
        self.body = nn.Sequential(
            nn.Sequential(*[Block(size) for _ in range(blocks // 2)]),
            nn.Sequential(*[Block(size) for _ in range(blocks - blocks // 2)]),
        )
        self.head = nn.Linear(size, 3)

    def forward(self, x):
        return self.head(self.body(x * self.gain) * self.mask)


class Tied(nn.Module):
    """An embedding whose weights are the head's too."""

    def __init__(self, words: int = 11, size: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.inner = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
        self.head = nn.Linear(size, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.inner(self.embed(words)))


class Unused(nn.Module):
    """A module that uses the weights of a child without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x):
        hidden = torch.nn.functional.linear(x, self.linear1.weight, self.linear1.bias)
        return torch.nn.functional.linear(hidden, self.linear2.weight, self.linear2.bias)


def seeded(model_class, *args, seed: int = 0):
    """A model of this class with weights that are the same each time, ready to be evaluated."""
    torch.manual_seed(seed)
    return model_class(*args).eval()


def empty(model_class, *args):
    """A model of this class without memory for its weights, whose tied ones stay tied."""
    with init_empty_weights():
        return model_class(*args).eval()


def differences(state, wanted) -> list[str]:
    """The names of a model's weights that are others in a state, or in a model."""
    found = state.state_dict() if isinstance(state, nn.Module) else state
    return [name for name, tensor in wanted.state_dict().items() if not torch.equal(found[name], tensor)]


def gpt2(tied: bool = True):
    """A tiny GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_head=2, n_embd=16, vocab_size=50, n_positions=32, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def bert():
    """A tiny BERT with random weights."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=50,
        max_position_embeddings=32,
    )  # fmt: skip
    return BertForMaskedLM(config).eval()
