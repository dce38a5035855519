"""Tests of strategies that are packages of their own; where a package is not installed, nothing of it can be shown."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# The package of the tests in a folder.
PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron.core"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of packages that are not installed."""
    for item in items:
        if Path(__file__).parent in item.path.parents and (missing := _missing(item.path)):
            item.add_marker(pytest.mark.skip(reason=f"{missing} is not installed here: `make test-scale` has it"))


def _missing(path: Path) -> str | None:
    package = PACKAGES.get(path.parent.name)
    if package is None:
        return None
    try:
        return None if find_spec(package) else package
    except ModuleNotFoundError:
        return package


@pytest.fixture(scope="session", autouse=True)
def _on_the_cpu() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
