"""Lists of hosts are read as MPI and DeepSpeed read them, and ranks are spread over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.launching.nodes.node_placement import Host, hosts_of, node_sizes, place_on_hosts, read_hostfile
from accelerate_nb.launching.nodes.run_nodes import find_nodes
from accelerate_nb.transport.messages import NodeFacts


def facts(kind: str = "cpu", devices: int = 0) -> NodeFacts:
    return NodeFacts("h", "10.0.0.1", "3.11.7", "2.13.0", "0.1.0", kind, "GPU", devices, 8, 0.0)


@pytest.mark.parametrize(
    ("number", "hosts", "devices", "sizes"),
    [
        (8, "a,b:4", (0, 0), (4, 4)),
        (5, "a,b", (0, 0), (3, 2)),
        (5, "a:4,b:4", (0, 0), (4, 1)),
        (None, "a,b:4", (0, 0), (1, 4)),
        (None, "a,b:4", (8, 8), (8, 4)),
        (7, "a:2,b,c", (0, 0, 0), (2, 3, 2)),
    ],
)
def test_ranks_are_spread_over_hosts(number, hosts, devices, sizes):
    assert node_sizes(number, hosts_of(hosts.split(",")), devices) == sizes


@pytest.mark.parametrize(
    ("number", "hosts", "text"),
    [
        (1, "a,b", "of which b would have no process"),
        (4, "a:4,b:4", "of which b would have no process"),
        (9, "a:4,b:4", "have 8 slots together"),
        (4, "a:4,b", "of which b would have no process"),
    ],
)
def test_numbers_that_leave_a_host_empty_or_have_no_room_are_refused(number, hosts, text):
    with pytest.raises(LaunchError, match=text):
        node_sizes(number, hosts_of(hosts.split(",")), (0, 0))


def test_hosts_have_slots_users_and_addresses():
    assert hosts_of(["a", "b:4", "me@c:2", "[::1]:3", "fe80::2", "b:1"]) == (
        Host("a"),
        Host("b", 5),
        Host("me@c", 2),
        Host("::1", 3),
        Host("fe80::2"),
    )


def test_a_hostfile_is_read_as_mpi_and_deepspeed_write_it(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("# of DeepSpeed\nworker-1 slots=4\nworker-2 slots = 2 max_slots=8\n\nmpich:3  # of MPICH\nalone\n")
    assert read_hostfile(file) == (Host("worker-1", 4), Host("worker-2", 2), Host("mpich", 3), Host("alone"))
    file.write_text("# nobody\n")
    with pytest.raises(ConfigurationError, match="names no host"):
        read_hostfile(file)
    with pytest.raises(ConfigurationError, match="can't be read"):
        read_hostfile(tmp_path / "another")


@pytest.mark.parametrize("value", ["", "a,,b", "-oProxyCommand=x", "a b", ["a", 3]])
def test_what_is_no_list_of_hosts_is_refused(value):
    with pytest.raises(ConfigurationError, match="hosts was given as"):
        resolve({"hosts": value}, {})


def test_hosts_with_accelerators_have_one_rank_for_each():
    placement, sizes = place_on_hosts(
        LaunchingConfig(), [Host("a"), Host("b")], [facts("cuda", 4), facts("cuda", 2)], "ssh"
    )
    assert (placement.kind, placement.size, sizes) == ("cuda", 6, (4, 2))
    assert "4 on a, 2 on b" in placement.why
    placement, sizes = place_on_hosts(
        LaunchingConfig(cpu=True), [Host("a"), Host("b")], [facts("cuda", 4), facts()], "ssh"
    )
    assert (placement.kind, sizes) == ("cpu", (1, 1))


@pytest.mark.parametrize(
    ("settings", "nodes", "text"),
    [
        ({}, [facts("cuda", 2), facts()], "a has cuda, b has cpu"),
        (
            {"num_processes": 6},
            [facts("cuda", 4), facts("cuda", 2)],
            "3 processes were requested on b, which has 2 GPUs",
        ),
        ({"gpu_ids": "0"}, [facts("cuda", 2), facts("cuda", 2)], "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_hosts_that_do_not_fit_are_named(settings, nodes, text):
    with pytest.raises(LaunchError, match=text):
        place_on_hosts(LaunchingConfig(**settings), [Host("a"), Host("b")], nodes, "ssh")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"hosts": "a", "hostfile": "b"}, "both requested"),
        ({"hosts": "a", "engine": "local"}, "runs elsewhere"),
        ({"engine": "ssh"}, "without hosts"),
        ({"hosts": "a", "start_method": "spawn"}, "start_method='spawn' was requested on several nodes"),
    ],
)
def test_settings_that_contradict_hosts_are_refused_before_any_is_reached(settings, text):
    with pytest.raises(LaunchError, match=text):
        find_nodes(resolve(settings, {}))
