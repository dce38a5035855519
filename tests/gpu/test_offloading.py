"""Models whose weights lie on the host or on the disk compute on the GPU, whose memory they leave again."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate_nb import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate_nb.utils.modeling import compute_module_sizes

WIDTH, LAYERS = 256, 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).eval()


@pytest.fixture
def computed() -> torch.Tensor:
    """What the network gives where nothing of it is elsewhere."""
    with torch.no_grad():
        return network()(torch.ones(2, WIDTH))


def run(model: nn.Module, device: str) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.ones(2, WIDTH, device=device))


def taken(device: str) -> int:
    """The bytes that tensors take on the GPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


OFFLOAD: dict[str, Callable[[nn.Module, Path, str], object]] = {
    "host": lambda model, folder, device: cpu_offload(model, torch.device(device)),
    "disk": lambda model, folder, device: disk_offload(model, str(folder), torch.device(device)),
}


@pytest.mark.parametrize("where", OFFLOAD)
def test_weights_come_for_their_layer_and_leave_again(
    where: str, device: str, computed: torch.Tensor, tmp_path: Path
) -> None:
    model = network()
    OFFLOAD[where](model, tmp_path, device)
    assert all(parameter.is_meta for parameter in model.parameters())
    run(model, device)
    before = taken(device)
    output = run(model, device)
    assert torch.allclose(output.cpu(), computed, atol=1e-4)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert taken(device) - before <= output.numel() * output.element_size() + 1024


def place_of(model: nn.Module) -> str:
    (place,) = {parameter.device.type for parameter in model.parameters()}
    return place


def test_whole_models_come_in_turns_and_go_by_their_hooks(device: str, computed: torch.Tensor) -> None:
    first, hook = cpu_offload_with_hook(network(), torch.device(device))
    second, other_hook = cpu_offload_with_hook(network(), torch.device(device), prev_module_hook=hook)
    assert (place_of(first), place_of(second)) == ("cpu", "cpu")
    assert torch.allclose(run(first, device).cpu(), computed, atol=1e-4)
    assert (place_of(first), place_of(second)) == (device, "cpu")
    assert torch.allclose(run(second, device).cpu(), computed, atol=1e-4)
    assert (place_of(first), place_of(second)) == ("cpu", device)
    other_hook.offload()
    assert place_of(second) == "cpu"


def test_an_automatic_map_fills_the_device_then_the_host_then_the_disk(
    device: str, computed: torch.Tensor, tmp_path: Path
) -> None:
    sizes = compute_module_sizes(network())
    first = 0 if device == "cuda" else "cpu"
    # on the GPU as much as three layers, of which one's room is kept for those that come from elsewhere
    budget: dict[int | str, int] = {first: 3 * sizes["0"] + 1}
    if device == "cuda":
        budget["cpu"] = 2 * sizes["0"] + 1
    torch.save(network().state_dict(), tmp_path / "weights.bin")
    with init_empty_weights():
        model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_checkpoint_and_dispatch(
            model, str(tmp_path / "weights.bin"), device_map="auto", max_memory=budget, offload_folder=str(tmp_path)
        )
    places = [model.hf_device_map[str(number)] for number in range(LAYERS)]
    order = [first, "cpu", "disk"]
    assert places == sorted(places, key=order.index)
    assert set(places) == set(order)
    assert {parameter.device.type for parameter in model[0].parameters()} == {device}
    assert torch.allclose(run(model, device).cpu(), computed, atol=1e-4)
    assert sum(parameter.is_meta for parameter in model.parameters()) == 2 * sum(target != first for target in places)
