"""A small model of transformers, its training with nothing but PyTorch, and what a checkpoint gives it back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def llama(*, tied: bool = False, heads: int = 4, **settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    widths = {"num_attention_heads": heads, "num_key_value_heads": heads, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **widths, **settings}))


def batches() -> torch.Tensor:
    return torch.randint(0, 32, (3, 4, 8), generator=torch.Generator().manual_seed(1))


def by_hand(make: Callable[[], nn.Module] = llama) -> dict[str, Any]:
    model, norms, losses = make(), [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in batches():
        output = model(input_ids=batch, labels=batch)
        output.loss.backward()
        losses.append(output.loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"state": dict(model.state_dict()), "norms": norms, "losses": losses, "logits": output.logits.detach()}


def loaded(folder: str, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The complete weights that a checkpoint gives a model, with what its optimizer remembered."""
    from accelerate_nb import Accelerator

    accelerator = Accelerator(cpu=True, **arguments)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    accelerator.load_state(folder)
    # a weight of another stage of a pipeline has a state without numbers
    momenta = [kept["momentum_buffer"] for kept in optimizer.state.values() if not kept["momentum_buffer"].is_meta]
    assert momenta
    assert all(momentum.to(torch.float64).abs().sum() > 0 for momentum in momenta)
    return dict(accelerator.get_state_dict(model))
