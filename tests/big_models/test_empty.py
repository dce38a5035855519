"""Models are made without memory for their weights, and nothing stays changed."""

import accelerate
import pytest
import torch
from torch import nn

import accelerate_nb
from tests.big_models.models import Small, Tied, gpt2

BOTH = [pytest.param(accelerate, id="accelerate"), pytest.param(accelerate_nb, id="accelerate_nb")]


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("include", [None, False, True])
def test_parameters_take_no_memory_nor_do_buffers_where_the_environment_has_it(package, include, monkeypatch):
    with package.init_empty_weights(include_buffers=include):
        model = Small()
        loose = torch.ones(2)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta" if include else "cpu"}
    assert loose.is_meta == bool(include)
    assert model.linear1.weight.requires_grad
    assert not Small().linear1.weight.is_meta
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with package.init_empty_weights():
        assert Small().batchnorm.running_mean.is_meta


@pytest.mark.parametrize("package", BOTH)
def test_an_error_leaves_torch_as_it_was(package):
    register, zeros = nn.Module.register_parameter, torch.zeros
    for include in (False, True):
        with pytest.raises(KeyError), package.init_empty_weights(include_buffers=include):
            Small()
            raise KeyError
        assert nn.Module.register_parameter is register
        assert torch.zeros is zeros
        assert not torch.zeros(1).is_meta


@pytest.mark.parametrize("package", BOTH)
def test_blocks_can_stand_in_blocks(package):
    register = nn.Module.register_parameter
    with package.init_empty_weights():
        with package.init_on_device(torch.device("cpu")):
            pass
        with package.init_empty_weights(include_buffers=True):
            inner = Small()
        outer = Small()
    assert inner.batchnorm.running_mean.is_meta
    assert not outer.batchnorm.running_mean.is_meta
    assert outer.linear1.weight.is_meta
    assert nn.Module.register_parameter is register


@pytest.mark.parametrize("package", BOTH)
def test_marks_of_transformers_and_of_others_on_a_weight_stay(package):
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    weight._is_hf_initialized = True
    if package is accelerate_nb:
        weight.partition = "row"  # an error of Parameter's class under Accelerate
    with package.init_empty_weights():
        module = nn.Module()
        module.weight = weight
    assert module.weight.is_meta
    assert module.weight._is_hf_initialized
    assert getattr(module.weight, "partition", "row") == "row"
    assert hasattr(module.weight, "partition") == (package is accelerate_nb)
    assert not module.weight.requires_grad


def test_tied_weights_stay_tied_and_a_large_model_is_made_at_once():
    with accelerate_nb.init_empty_weights():
        model, other = Tied(), gpt2()
        large = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(100)])
    assert model.head.weight is model.embed.weight  # two parameters under Accelerate
    assert other.lm_head.weight.is_meta
    assert sum(parameter.numel() for parameter in large.parameters()) > 10**10


def test_a_device_may_be_a_name():
    with accelerate_nb.init_on_device("meta"):
        assert nn.Linear(2, 2).weight.is_meta
    with accelerate_nb.init_on_device("meta", include_buffers=True):
        assert nn.BatchNorm1d(2).running_mean.is_meta
    with pytest.raises(ValueError, match="no such device"), accelerate_nb.init_on_device("gpu"):
        pass
