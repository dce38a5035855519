"""Hosts for the tests of this folder, and functions that run on them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.launching.nodes import node_pool
from tests.nodes.hosts import Hosts, made_hosts
from tests.nodes.trainings import TWO_RANKS


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts, which all tests share; a test leaves them as it found them."""
    with made_hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made
        node_pool.close_nodes()


@pytest.fixture
def settings(hosts: Hosts, tmp_path: Path) -> dict[str, Any]:
    """A launch of two ranks on two hosts."""
    return {**TWO_RANKS, "hosts": ["h1", "h2"], "ssh_command": hosts.ssh_command, "folder": str(tmp_path)}
