"""Lists of hosts are read as MPI and DeepSpeed read them; ranks are spread over them, and spares take the places of lost ones."""

from pathlib import Path

import pytest

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.launching.nodes import run_nodes
from accelerate_nb.launching.nodes.run_nodes import find_nodes
from accelerate_nb.launching.planning.placement import Host, NodeRoster, Placement, node_sizes
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
    assert node_sizes(number, run_nodes.hosts_of(hosts.split(",")), devices) == sizes


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
        node_sizes(number, run_nodes.hosts_of(hosts.split(",")), (0, 0))


def test_hosts_have_slots_users_and_addresses():
    found = run_nodes.hosts_of(["a", "b:4", "me@c:2", "[::1]:3", "fe80::2", "b:1"])
    assert found == (Host("a"), Host("b", 5), Host("me@c", 2), Host("::1", 3), Host("fe80::2"))


def test_a_hostfile_is_read_as_mpi_and_deepspeed_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "hosts"
    file.write_text("\ufeffworker-1 slots=4  # of DeepSpeed\nfe80::2 slots = 2 max_slots=8\n\nmpich:3\nalone\n")
    found = (Host("worker-1", 4), Host("fe80::2", 2), Host("mpich", 3), Host("alone"))
    assert run_nodes.read_hostfile(Path("~/hosts")) == found
    for text, why in (("# nobody\n", "names no host"), ("-oProxyCommand=x slots=1", "begins with a hyphen")):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=why):
            run_nodes.read_hostfile(file)
    with pytest.raises(ConfigurationError, match="can't be read"):
        run_nodes.read_hostfile(tmp_path / "another")


@pytest.mark.parametrize("value", ["", "a,,b", "-oProxyCommand=x", "a b", ["a", 3]])
def test_what_is_no_list_of_hosts_is_refused(value):
    with pytest.raises(ConfigurationError, match="hosts was given as"):
        resolve({"hosts": value}, {})


def test_hosts_with_accelerators_have_one_rank_for_each():
    placement, sizes = run_nodes.place_on_hosts(
        LaunchingConfig(), [Host("a"), Host("b")], [facts("cuda", 4), facts("cuda", 2)], "ssh"
    )
    assert (placement.kind, placement.size, sizes) == ("cuda", 6, (4, 2))
    assert "4 on a, 2 on b" in placement.why
    placement, sizes = run_nodes.place_on_hosts(
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
        run_nodes.place_on_hosts(LaunchingConfig(**settings), [Host("a"), Host("b")], nodes, "ssh")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"hosts": "a", "hostfile": "b"}, "both requested"),
        ({"hosts": "a", "engine": "local"}, "runs elsewhere"),
        ({"engine": "ssh"}, "without hosts"),
        ({"hosts": "a", "start_method": "spawn"}, "start_method='spawn' was requested on several nodes"),
        ({"hosts": "a", "ssh_command": ""}, "ssh_command='' was given, which is no command"),
        ({"hosts": "a", "ssh_command": "ssh -o 'x"}, "which is no command"),
    ],
)
def test_settings_that_contradict_hosts_are_refused_before_any_is_reached(settings, text):
    with pytest.raises(LaunchError, match=text):
        find_nodes(resolve(settings, {}))


ROSTER = NodeRoster(("a", "b", "c"), (2, 1, 2), (Host("d", 1), Host("e", 2)))


@pytest.mark.parametrize(
    ("number", "hosts", "used"),
    [
        *((4, "a:2,b:2,c:2", 2), (3, "a:2,b:2,c:2", 2), (5, "a:2,b:2,c:2", 3), (9, "a:4,b:4", 2)),
        # without a number of processes or slots no host is a spare
        *((None, "a:2,b:2", 2), (2, "a:2,b", 2), (1, "a,b", 2)),
    ],
)
def test_hosts_are_filled_in_their_order_and_those_beyond_are_spares(number, hosts, used):
    found = run_nodes.hosts_of(hosts.split(","))
    assert run_nodes.split_spares(number, found) == (found[:used], found[used:])


def test_the_first_spare_with_room_takes_the_place_of_a_lost_node_which_is_the_last_spare_then():
    roster, text = run_nodes.replace_lost(ROSTER, [2], lambda _: True)
    assert roster == NodeRoster(("a", "b", "e"), (2, 1, 2), (Host("d", 1), Host("c", 2)))
    assert text == "node c was lost; ranks 3-4 start again on e"


def test_two_lost_nodes_need_two_spares_with_room():
    roster, text = run_nodes.replace_lost(ROSTER, [0, 1], lambda _: True)
    assert roster.names == ("e", "d", "c")
    assert text == "node a was lost; ranks 0-1 start again on e; node b was lost; rank 2 starts again on d"
    assert run_nodes.replace_lost(ROSTER, [0, 2], lambda _: True) is None


def test_a_spare_that_can_not_be_reached_is_passed_over():
    roster = NodeRoster(("a", "b"), (1, 1), (Host("c", 1), Host("d", 1)))
    after, _ = run_nodes.replace_lost(roster, [1], lambda name: name != "c")
    assert (after.names, after.spares) == (("a", "d"), (Host("b", 1),))
    assert run_nodes.replace_lost(roster, [1], lambda _: False) is None


def test_a_spare_needs_the_devices_of_the_others():
    placement = Placement("supervisor", 2, cpu=False, why="", kind="cuda")
    assert run_nodes.spares_with_slots(placement, (2,), [Host("c", 2)], [facts("cuda", 2)]) == (Host("c", 2),)
    for found in (facts(), facts("cuda", 1), facts("xpu", 2)):
        with pytest.raises(LaunchError, match="c:2 is a spare"):
            run_nodes.spares_with_slots(placement, (2,), [Host("c", 2)], [found])
    on_cpu = Placement("supervisor", 2, cpu=True, why="")
    assert run_nodes.spares_with_slots(on_cpu, (2,), [Host("c", 2)], [facts()]) == (Host("c", 2),)


def test_a_spare_without_slots_has_room_for_any_node_as_far_as_its_devices_allow():
    spares, found = [Host("c"), Host("d", 1)], [facts("cuda", 2), facts("cuda", 2)]
    on_cpu = Placement("supervisor", 5, cpu=True, why="")
    assert run_nodes.spares_with_slots(on_cpu, (4, 1), spares, found) == (Host("c", 4), Host("d", 1))
    on_gpus = Placement("supervisor", 5, cpu=False, why="", kind="cuda")
    assert run_nodes.spares_with_slots(on_gpus, (4, 1), spares, found) == (Host("c", 2), Host("d", 1))


def test_fewer_nodes_keep_their_number_of_ranks_as_long_as_the_fewest_are_left():
    roster, text = run_nodes.leave_out(ROSTER, [0], min_nodes=2)
    assert roster == NodeRoster(("b", "c"), (1, 2), ROSTER.spares)
    assert text == "node a was lost; 3 of 5 ranks start again, on b, c"
    assert run_nodes.leave_out(ROSTER, [0], min_nodes=3) is None
    assert run_nodes.leave_out(ROSTER, [0], min_nodes=None) is None
    assert run_nodes.leave_out(ROSTER, [0, 1, 2], min_nodes=1) is None


@pytest.mark.parametrize(
    "sources",
    [
        ({"num_nodes": "1:2"}, {}, {}),
        ({}, {"ACCELERATE_NB_NUM_NODES": "1:2"}, {"num_machines": 3}),
        ({}, {}, {"num_machines": "1:2"}),
    ],
)
def test_a_range_of_nodes_is_spelled_as_for_torchrun_by_whoever_gives_it(sources):
    arguments, environment, file = sources
    launching = resolve({"hosts": ["a", "b"], "max_restarts": 1, **arguments}, environment, file).launching
    assert (launching.min_nodes, launching.num_nodes) == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": "1:", "hosts": "a,b"}, "the fewest and the most"),
        ({"num_nodes": "1:2", "hosts": "a,b"}, "without max_restarts"),
        ({"num_nodes": "1:2", "max_restarts": 1}, "no other machines.*rdzv_backend='c10d'"),
        ({"num_nodes": "3:2", "hosts": "a,b", "max_restarts": 1}, "smaller number first"),
        ({"num_nodes": "1:2", "min_nodes": 1, "hosts": "a,b", "max_restarts": 1}, "both given"),
    ],
)
def test_a_range_of_nodes_that_can_not_work_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(arguments, {}).launching.check_min_nodes()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_nodes": "1:3"}, "the processes are on 2 nodes"),
        ({"num_nodes": "1:2", "parallelism_config": {"tp_size": 2}}, "tp_size: 2.*fixed number of processes"),
        ({"min_nodes": 3}, "the processes are on 2 nodes"),
    ],
)
def test_fewer_nodes_need_a_world_that_may_change(more, message):
    config = resolve({"hosts": "a,b", "max_restarts": 1, **more}, {})
    with pytest.raises(LaunchError, match=message):
        run_nodes.check_min_nodes(config, ["a", "b"])
