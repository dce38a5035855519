"""Mistakes that raise nothing are warned of at the first step, once, at the person's own line; what is right is not."""

import warnings

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator
from accelerate_nb.runtime.training.local_sgd import LocalSGD
from tests.ranks import run_on_ranks


def steps(call, model, optimizer, backward, count=3):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            backward(call(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
    ours = [item for item in caught if "accelerator" in str(item.message) or "prepare" in str(item.message)]
    assert all(our.filename == __file__ for our in ours)
    return [str(our.message) for our in ours]


def made(**settings):
    model = nn.Linear(4, 1)
    return Accelerator(cpu=True, **settings), model, torch.optim.SGD(model.parameters(), lr=0.1)


def the_model_as_it_was():
    accelerator, model, optimizer = made()
    _, optimizer = accelerator.prepare(model, optimizer)
    return steps(model, model, optimizer, accelerator.backward)


def an_optimizer_without_its_model():
    accelerator, model, optimizer = made()
    optimizer = accelerator.prepare(optimizer)
    return steps(model, model, optimizer, accelerator.backward)


def a_plain_backward():
    accelerator, model, optimizer = made(gradient_accumulation_steps=4)
    model, optimizer = accelerator.prepare(model, optimizer)
    return steps(model, model, optimizer, torch.Tensor.backward)


MISTAKES = {
    the_model_as_it_was: "The prepared model was not called",
    an_optimizer_without_its_model: "in no prepared model",
    a_plain_backward: "4 times as large",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_that_raises_nothing_is_reported_once(mistake):
    for messages in run_on_ranks(mistake, 2):
        assert len(messages) == 1
        assert MISTAKES[mistake] in messages[0]


def everything_right():
    accelerator, model, optimizer = made(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    messages = steps(model, model, optimizer, accelerator.backward)
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        messages += steps(model, model, optimizer, accelerator.backward)
        local.step()
    return messages


def a_plain_backward_where_it_does_not_matter():
    accelerator, model, optimizer = made()
    model, optimizer = accelerator.prepare(model, optimizer)
    return steps(model, model, optimizer, torch.Tensor.backward)


def a_model_that_is_only_evaluated_and_one_that_learns():
    accelerator, model, optimizer = made()
    frozen = accelerator.prepare_model(nn.Linear(4, 4), evaluation_mode=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return steps(lambda batch: model(frozen(batch).detach()), model, optimizer, accelerator.backward)


def two_that_take_turns():
    accelerator, model, optimizer = made()
    other = nn.Linear(4, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    model, other, optimizer, second = accelerator.prepare(model, other, optimizer, second)
    messages = steps(model, model, optimizer, accelerator.backward)
    return messages + steps(other, other, second, accelerator.backward)


def one_that_is_prepared_again():
    messages = []
    for uses_first in (True, False):
        accelerator, model, optimizer = made()
        first = accelerator.prepare(model)
        again, optimizer, _ = accelerator.prepare(model, optimizer, accelerator.prepare_model(model))
        messages += steps(first if uses_first else again, model, optimizer, accelerator.backward)
    assert accelerator.prepare(again) is again
    other = Accelerator(cpu=True)
    again, optimizer = other.prepare(model, optimizer)
    return messages + steps(again, model, optimizer, other.backward)


RIGHT = [
    *(one_that_is_prepared_again, everything_right, a_plain_backward_where_it_does_not_matter),
    *(a_model_that_is_only_evaluated_and_one_that_learns, two_that_take_turns),
]


# one process needs no prepared model
@pytest.mark.parametrize("loop", [*RIGHT, the_model_as_it_was, an_optimizer_without_its_model])
def test_what_is_right_is_not_warned_of(loop):
    assert loop not in RIGHT or run_on_ranks(loop, 2) == [[], []]
    assert run_on_ranks(loop, 1) == [[]]
