"""Models whose weights were put somewhere before are taken, or refused, by where they lie."""

import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator, cpu_offload, disk_offload, dispatch_model, init_empty_weights
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.base import Strategy, check_quantised
from accelerate_nb.runtime.world.world import World
from tests.peers import Peer, under_both

GPU = torch.device("cuda", 1)


def quantised(**places: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.is_loaded_in_8bit = True  # type: ignore[assignment]  # as transformers marks it
    model.hf_device_map = places  # type: ignore[assignment]  # as transformers marks it
    return model


def test_quantised_weights_in_the_wrong_place_are_refused_and_those_on_the_process_s_device_taken() -> None:
    for offloaded in ({"a": "cpu"}, {"a": 1, "b": "disk"}):
        with pytest.raises(ConfigurationError, match="CPU or disk offload"):
            check_quantised(quantised(**offloaded), GPU)
    for other in ({"a": 0}, {"a": torch.device("cuda", 0)}):
        with pytest.raises(ConfigurationError, match="on a different device"):
            check_quantised(quantised(**other), GPU)
    for places in ({}, {"a": 1}, {"a": "cuda:1"}, {"a": GPU}, {"a": 0, "b": 1}):
        check_quantised(quantised(**places), GPU)
    check_quantised(nn.Linear(1, 1), GPU)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def test_a_model_without_weights_is_refused() -> None:
    with init_empty_weights():
        empty = two_layers()
    message = r"without weights: .*weight, .*bias.* on the meta device.*Load them first"
    for model, evaluated in product((empty, nn.Linear(1, 1, device="meta")), (False, True)):
        with pytest.raises(ConfigurationError, match=message):
            Accelerator(cpu=True).prepare_model(model, evaluation_mode=evaluated)


@pytest.mark.parametrize(
    "offload", [cpu_offload, lambda model, device: disk_offload(model, tempfile.mkdtemp(), device)], ids=["cpu", "disk"]
)
def test_offloaded_weights_are_refused_in_training_and_taken_for_inference(offload: Callable[..., Any]) -> None:
    accelerator = Accelerator(cpu=True)
    inputs, model = torch.ones(1, 2), two_layers()
    expected = model(inputs)
    offload(model, torch.device("cpu"))
    with pytest.raises(
        ConfigurationError, match=r"hooks keep weights on the CPU or the disk \(0.weight, 0.bias and 2 more\)"
    ):
        accelerator.prepare(model)
    assert accelerator.prepare_model(model, evaluation_mode=True)(inputs).equal(expected)
    assert accelerator.prepare(model.requires_grad_(False))(inputs).equal(expected)


def test_weights_of_a_dispatched_model_that_can_t_learn_are_named(tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), two_layers()
    with pytest.warns(UserWarning, match="These do not learn"):
        accelerator.prepare(dispatch_model(two_layers(), {"0": "cpu", "1": "disk"}, "cpu", offload_dir=tmp_path))
    dispatch_model(model, {"0": "cpu", "1": "disk"}, "cpu", offload_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"1.weight, 1.bias"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_part_of_a_model_that_lies_on_several_devices_stays_there(tmp_path: Path) -> None:
    model = nn.Sequential(two_layers())
    model[0].hf_device_map = {"0": 0, "1": 1}
    Strategy(World(0, 1, 0, 1, torch.device("meta"), None)).place(model)
    assert not model[0][0].weight.is_meta
    dispatch_model(model[0], {"0": "cpu", "1": "disk"}, "cpu", offload_dir=tmp_path)
    with pytest.warns(UserWarning, match="These do not learn"):
        Accelerator(cpu=True).prepare(model)


def answers(peer: Peer) -> list[str]:
    """What is said of models that lie on several devices."""
    import os

    outcomes = []
    accelerator = peer.Accelerator(cpu=True)
    marked = ({"hf_device_map": {"a": 0, "b": "cpu"}}, {"hf_device_map": {"": "cpu"}, "is_loaded_in_4bit": True})
    for marks, is_wrapped, evaluated in product(marked, (False, True), (False, True)):
        model = nn.Linear(1, 1)
        vars(model).update(marks)
        try:
            accelerator.prepare_model(nn.Sequential(model) if is_wrapped else model, evaluation_mode=evaluated)
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
