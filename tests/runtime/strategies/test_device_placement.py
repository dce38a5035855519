"""Models whose weights were put somewhere before are taken, or refused, by where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.device_placement import check_quantised
from tests.peers import Peer, under_both

GPU = torch.device("cuda", 1)


def quantised(**places: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.is_loaded_in_8bit = True  # type: ignore[assignment]  # as transformers marks it
    model.hf_device_map = places  # type: ignore[assignment]  # as transformers marks it
    return model


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "cpu"}, "CPU or disk offload"),
        ({"a": 1, "b": "disk"}, "CPU or disk offload"),
        ({"a": 0}, "on a different device"),
        ({"a": torch.device("cuda", 0)}, "on a different device"),
    ],
)
def test_quantised_weights_in_the_wrong_place_are_refused(places: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_quantised(quantised(**places), GPU)


@pytest.mark.parametrize("places", [{}, {"a": 1}, {"a": "cuda:1"}, {"a": GPU}, {"a": 0, "b": 1}])
def test_quantised_weights_on_the_process_s_device_are_taken(places: dict[str, Any]) -> None:
    check_quantised(quantised(**places), GPU)
    check_quantised(nn.Linear(1, 1), GPU)


def answers(peer: Peer) -> list[str]:
    """What is said of models that lie on several devices."""
    import os

    outcomes = []
    accelerator = peer.Accelerator(cpu=True)
    for marks in ({"hf_device_map": {"a": 0, "b": "cpu"}}, {"hf_device_map": {"": "cpu"}, "is_loaded_in_4bit": True}):
        for evaluated in (False, True):
            model = nn.Linear(1, 1)
            vars(model).update(marks)
            try:
                accelerator.prepare_model(model, evaluation_mode=evaluated)
                outcomes.append("taken")
            except ValueError as error:
                outcomes.append("device_map" if "device_map='auto'" in str(error) else "offload")
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    model = nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": "cpu"}  # type: ignore[assignment]  # as transformers marks it
    outcomes.append(type(accelerator.prepare_model(model)).__name__)
    accelerator.end_training()
    return outcomes


def test_models_on_several_devices_are_refused_as_accelerate_refuses_them() -> None:
    both = under_both(answers, 2)
    assert both.ours == both.theirs
    assert "offload" in both.ours[0]
