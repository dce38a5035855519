"""Agents on this machine that are those of other machines for whoever launches on them."""

import sys
from collections.abc import Iterator
from typing import ClassVar
from unittest import mock

import pytest

from accelerate_nb.launching.nodes import node_pool
from accelerate_nb.launching.nodes.node_pool import LocalNodes, PlacedAgent


class FarNodes(LocalNodes):
    """They have their own environment, and are spoken with over a stream that passes no descriptors, as through ssh."""

    inherits_environment = True
    placed: ClassVar[list[PlacedAgent]] = []

    def place(self, node: str) -> PlacedAgent:
        self.placed.append(node_pool.start_command(node_pool.agent_command(sys.executable)))
        return self.placed[-1]


@pytest.fixture(scope="module")
def far_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[FarNodes]]:
    """Nodes are far, and have a cache of their own; their agents stay for the tests that follow."""
    node_pool.close_nodes()
    with pytest.MonkeyPatch.context() as patch, mock.patch.object(node_pool, "LocalNodes", FarNodes):
        # agents have it from here
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache of the nodes")))
        yield FarNodes
        node_pool.close_nodes()
