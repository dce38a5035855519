"""Nodes that run something else than this process are named in one table before anything starts."""

import pytest
from msgspec import structs

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.node_agent.node_network import NodeNetwork, check_versions
from accelerate_nb.transport.messages import ListenToPeers, NodeFacts
from accelerate_nb.transport.worker_spec import LOOPBACK_INTERFACE

HERE = NodeFacts("h", "10.0.0.1", "3.11.7", "2.13.0+cpu", "0.1.0", "cpu", "CPU", 0, 8, 0.0)


def test_builds_and_patches_of_the_same_version_go_together() -> None:
    check_versions(HERE, {"a": structs.replace(HERE, torch="2.13.0+cu126", python="3.11.9")})


@pytest.mark.parametrize(
    ("change", "cell"),
    [({"python": "3.12.1"}, "3.12.1"), ({"torch": "2.12.0"}, "2.12.0"), ({"torch": ""}, "not installed")],
)
def test_another_version_is_refused_with_the_versions_of_all(change: dict[str, str], cell: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_versions(HERE, {"a": HERE, "b": structs.replace(HERE, **change)})
    head, _, table = str(caught.value).partition("\n\n")
    rows = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "b has other versions" in head
    assert cell in rows["b (differs)"]
    assert {"this process", "a", "b (differs)"} <= rows.keys()


@pytest.mark.parametrize(("named", "host"), [("=", "127.0.0.1"), ("^", "127.0.0.2")])
def test_a_node_listens_on_the_interface_that_is_named_and_not_for_one_that_is_excluded(
    monkeypatch: pytest.MonkeyPatch, named: str, host: str
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", f"{named}{LOOPBACK_INTERFACE},docker0")
    network = NodeNetwork("127.0.0.2")
    assert network.listen(ListenToPeers(0, ())).host == host
    network.close()
