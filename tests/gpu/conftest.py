"""Each promise of this folder is tried on the CPU, and on NVIDIA GPUs where there are some: one rank on each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_nb import launch
from accelerate_nb.launching.run import Run

ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder that need a GPU are skipped where torch sees none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no NVIDIA GPU here: `make test-gpu` runs this on one"))


@pytest.fixture(scope="module", params=["cpu", ON_A_GPU])
def device(request: pytest.FixtureRequest) -> str:
    """The kind of device on which a test's promise is tried, in torch's word."""
    return str(request.param)


@pytest.fixture
def ranks(device: str) -> int:
    """How many ranks a launch has there: one for each GPU, or two on the CPU."""
    return torch.cuda.device_count() if device == "cuda" else 2


@pytest.fixture
def started(device: str, ranks: int, tmp_path: Path) -> Callable[..., Run]:
    """Launches a function on every rank, and gives its run."""

    def start(function: Callable[..., Any], *args: Any, **settings: Any) -> Run:
        defaults = {"num_processes": ranks, "cpu": device == "cpu", "config_file": "", "results": "all"}
        return launch(function, args, panel="off", folder=str(tmp_path / "runs"), **{**defaults, **settings})

    return start


@pytest.fixture
def launched(started: Callable[..., Run]) -> Callable[..., list[Any]]:
    """Launches a function on every rank, waits for it, and gives every rank's result."""

    def run(function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        return list(started(function, *args, **settings).wait(100))

    return run
