"""The masks of Megatron's engine, and the choice of its next token, on tensors of this process."""

from __future__ import annotations

import pytest
import torch

from accelerate_nb.runtime.strategies.megatron.engine import choose
from accelerate_nb.runtime.strategies.megatron.train_steps import left_to_right

END = 9


def test_a_token_sees_itself_and_what_stands_before_it() -> None:
    mask, loss_mask, positions = left_to_right(torch.tensor([[1, END, 2, 3]]), end_of_document=None, pad=None)
    assert torch.equal(mask, torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None])
    assert loss_mask.tolist() == [[1.0] * 4]
    assert positions.tolist() == [[0, 1, 2, 3]]


def test_documents_see_nothing_of_each_other_and_begin_at_zero() -> None:
    tokens = torch.tensor([[1, END, 2, 3], [1, 2, END, 3]])
    mask, loss_mask, positions = left_to_right(
        tokens, end_of_document=END, pad=None, reset_position_ids=True, reset_attention_mask=True, masks_ends=True
    )
    # an end belongs to the document that it ends
    seen = [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]],
    ]
    assert torch.equal(~mask[:, 0], torch.tensor(seen).bool())
    assert positions.tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]
    assert loss_mask.tolist() == [[1, 0, 1, 1], [1, 1, 0, 1]]


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        ({}, {3}),
        ({"temperature": 0.0}, {3}),
        ({"top_k": 1, "temperature": 5.0}, {3}),
        ({"top_k": 2, "temperature": 5.0}, {3, 1}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.85}, {3, 1}),
        ({"temperature": 50.0}, {0, 1, 2, 3}),
    ],
)
def test_a_token_is_drawn_among_the_likeliest(settings: dict[str, float], possible: set[int]) -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.05, 0.3, 0.05, 0.6]).log().repeat(500, 1)
    known = {"temperature": None, "top_k": None, "top_p": None}
    assert set(choose(logits, **{**known, **settings}).tolist()) == possible
