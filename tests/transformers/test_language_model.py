"""A language model of `transformers` learns the same under Accelerate and under this package."""

from pydoc_data.topics import topics  # the chapters of Python's reference manual, which every Python carries
from typing import Any

import pytest
import torch

from tests.peers import Peer, under_both

pytest.importorskip("transformers")
LENGTH, STEPS = 48, 24


def pieces_of_the_manual() -> torch.Tensor:
    """Text in pieces of equal length, byte by byte."""
    text = bytearray("".join(topics.values()).encode())[: 40 * 4 * LENGTH]
    return torch.frombuffer(text, dtype=torch.uint8).long().view(-1, LENGTH)


def learn(peer: Peer) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

    accelerator = peer.Accelerator(gradient_accumulation_steps=2)
    peer.door("utils").set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=256, **sizes, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=STEPS)
    loader = torch.utils.data.DataLoader(pieces_of_the_manual(), batch_size=4, shuffle=True)
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
    losses, norms = [], []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    weights = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "rate": rates.get_last_lr(), "weights": weights}


def test_losses_norms_rates_and_weights_are_those_of_accelerate() -> None:
    both = under_both(learn, 2)
    for theirs, ours in zip(both.theirs, both.ours, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert ours["losses"][-1] < 0.7 * ours["losses"][0]
