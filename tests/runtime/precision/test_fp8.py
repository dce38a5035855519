"""Training in 8-bit floats: by torchao where that is installed, and a clear word where something is missing."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator, notebook_launcher
from accelerate_nb.errors import ConfigurationError, MissingExtraError
from accelerate_nb.runtime.compat.packages import is_torchao_available, is_transformer_engine_available
from accelerate_nb.utils import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    apply_fp8_autowrap,
    has_transformer_engine_layers,
)
from accelerate_nb.utils.ao import (
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.loops import train_epoch

needs_torchao = pytest.mark.skipif(not is_torchao_available(), reason="torchao is not installed")


def wide() -> nn.Sequential:
    """A network whose inner layers have sizes that 8-bit products need, but one."""
    first = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 16))


def trained(peer: Peer, explicit: bool) -> list[Any]:
    torch.manual_seed(0)
    handlers = []
    if explicit:
        # without it Accelerate's own default would put weights in the layers that the optimizer does not know
        handlers.append(peer.door("utils").AORecipeKwargs(pad_inner_dim=True, enable_fsdp_float8_all_gather=False))
    accelerator = peer.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)
    model = wide()
    names = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(64, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.flip(1)), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        losses += train_epoch(accelerator, model, optimizer, None, loader)
    bare = accelerator.unwrap_model(model)
    kinds = [type(module).__name__ for module in bare]
    assert list(accelerator.get_state_dict(model)) == names
    return [losses, kinds, [parameter.tolist() for parameter in bare.parameters()], str(accelerator.fp8_backend)]


@pytest.mark.slow
@needs_torchao
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_torchao_trains_as_with_accelerate(size: int) -> None:
    both = under_both(trained, size, True)
    assert both.ours == both.theirs
    losses, kinds, _, package = both.ours[0]
    assert kinds == ["Linear", "ReLU", "Float8Linear", "ReLU", "Linear", "Linear", "Linear"]
    assert losses[-1] < losses[0]
    assert package == "FP8BackendType.AO"


@pytest.mark.slow
@needs_torchao
def test_converted_layers_learn_without_a_handler_too() -> None:
    ours = Peer("accelerate_nb")
    assert run_on_ranks(trained, 1, ours, False) == run_on_ranks(trained, 1, ours, True)


@needs_torchao
def test_a_model_is_converted_where_it_is() -> None:
    model = wide()
    weights = list(model.parameters())
    assert not has_ao_layers(model)
    convert_model_to_fp8_ao(model, module_filter_func=lambda module, name: name == "4")
    assert has_ao_layers(model)
    assert [type(module).__name__ == "Float8Linear" for module in model] == [False] * 4 + [True] + [False] * 2
    assert all(weight is other for weight, other in zip(weights, model.parameters(), strict=True))


def test_layers_are_chosen_by_place_and_size() -> None:
    model = wide()
    assert find_first_last_linear_layers(model) == ("0", "6")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)
    chosen = [name for name, module in model.named_children() if filter_linear_layers(module, name, ["0", "6"])]
    assert chosen == ["1", "2", "3"]
    assert not filter_first_and_last_linear_layers(model, "0")
    assert filter_first_and_last_linear_layers(model, "2")


@pytest.mark.skipif(is_torchao_available(), reason="torchao is installed")
def test_torchao_is_named_where_it_is_missing() -> None:
    for call in (AORecipeKwargs, lambda: has_ao_layers(wide()), lambda: Accelerator(cpu=True, mixed_precision="fp8")):
        with pytest.raises(MissingExtraError, match="pip install torchao"):
            call()


@pytest.mark.skipif(is_transformer_engine_available(), reason="Transformer Engine is installed")
def test_transformer_engine_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    for call in (
        TERecipeKwargs,
        lambda: has_transformer_engine_layers(wide()),
        lambda: apply_fp8_autowrap(wide(), None),
        lambda: Accelerator(cpu=True, mixed_precision="fp8"),
    ):
        with pytest.raises(ImportError, match="Transformer Engine, which is not installed"):
            call()
    with pytest.raises(ImportError), pytest.warns(FutureWarning, match="FP8RecipeKwargs is deprecated"):
        FP8RecipeKwargs(backend="TE")


def test_ms_amp_is_named_where_it_is_requested_and_a_recipe_without_the_precision_is_an_error() -> None:
    with pytest.raises((ImportError, NotImplementedError), match="MS-AMP"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs(opt_level="O1")])
    with pytest.raises(ConfigurationError, match="`opt_level` must be one of O1 or O2, but is 'O3'"):
        MSAMPRecipeKwargs(opt_level="O3")
    with pytest.raises(ConfigurationError, match="requires setting `mixed_precision='fp8'`: it is 'bf16'"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[MSAMPRecipeKwargs()])


def recipe_settings(peer: Peer) -> list[Any]:
    os.environ.update(ACCELERATE_FP8_OPT_LEVEL="O1", ACCELERATE_FP8_PAD_INNER_DIM="no")
    recipe = peer.door("utils").MSAMPRecipeKwargs()
    found = [recipe.opt_level, recipe.to_kwargs(), str(peer.Accelerator(cpu=True).fp8_backend)]
    with contextlib.suppress(ImportError):
        config = peer.door("utils").AORecipeKwargs().config
        found += [config.pad_inner_dim, config.enable_fsdp_float8_all_gather]
    os.environ["ACCELERATE_FP8_BACKEND"] = "MSAMP"
    return [*found, str(peer.Accelerator(cpu=True).fp8_backend)]


@pytest.mark.slow
def test_recipes_read_accelerates_variables() -> None:
    both = under_both(recipe_settings, 1)
    assert both.ours == both.theirs


def test_an_unknown_package_is_an_error_that_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "fast")
    with pytest.raises(ConfigurationError, match="'NO', 'TE', 'MSAMP', 'AO'"):
        Accelerator(cpu=True, mixed_precision="fp8")


def precision_of_a_worker() -> tuple[str, bool]:
    accelerator = Accelerator()
    model = wide()
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return accelerator.mixed_precision, has_ao_layers(model)


@pytest.mark.slow
@needs_torchao
def test_a_launch_and_a_configuration_file_request_fp8(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: MULTI_CPU\nmixed_precision: fp8\nfp8_config: {backend: AO}\nuse_cpu: true\n")
    for settings in ({"mixed_precision": "fp8", "config_file": "", "cpu": True}, {"config_file": str(file)}):
        assert notebook_launcher(precision_of_a_worker, num_processes=1, timeout=60, **settings) == ("fp8", True)
