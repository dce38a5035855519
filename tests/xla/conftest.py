"""Functions are launched on torch_xla's CPU backend; this process itself never wakes its runtime, as a notebook's should not."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb import launch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder are found by `-k xla`; where torch_xla is not installed, nothing of this can be shown."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.extra_keyword_matches.add("xla")
            if find_spec("torch_xla") is None:
                item.add_marker(pytest.mark.skip(reason="torch_xla is not installed here: `make test-tpu` has it"))


@pytest.fixture
def on_xla(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Callable[..., list[Any]]:
    """
    Runs a function on ranks that compute through torch_xla, and gives every rank's result.

    `num_processes` ranks are as many processes, each with a device of torch_xla's CPU backend.
    """
    monkeypatch.setenv("PJRT_DEVICE", "CPU")

    def run(function: Callable[..., Any], *args: Any, num_processes: int = 1, **settings: Any) -> list[Any]:
        options = {"config_file": "", "folder": str(tmp_path / "runs"), "results": "all", "panel": "off", **settings}
        return launch(function, args, num_processes=num_processes, **options).wait(110)

    return run


@pytest.fixture(scope="module")
def launched_on_xla(tmp_path_factory) -> Iterator[Callable[..., list[Any]]]:
    """The same as `on_xla`, for what the tests of a module look at together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        options = {"config_file": "", "folder": str(tmp_path_factory.mktemp("runs")), "results": "all", "panel": "off"}

        def run(function: Callable[..., Any], *args: Any, num_processes: int = 1) -> list[Any]:
            return launch(function, args, num_processes=num_processes, **options).wait(110)

        yield run
