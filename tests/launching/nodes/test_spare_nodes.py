"""Hosts beyond those that the processes need are spares, which take the places of lost ones; or a run goes on with fewer."""

from __future__ import annotations

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.launching.nodes.node_placement import (
    Host,
    NodeRoster,
    check_min_nodes,
    check_spares,
    hosts_of,
    leave_out,
    reachable_change,
    replace_lost,
    spares_with_slots,
    split_spares,
)
from accelerate_nb.launching.planning.placement import Placement
from tests.launching.nodes.test_node_placement import facts

ROSTER = NodeRoster(("a", "b", "c"), (2, 1, 2), (Host("d", 1), Host("e", 2)))


@pytest.mark.parametrize(
    ("number", "hosts", "used"),
    [(4, "a:2,b:2,c:2", 2), (3, "a:2,b:2,c:2", 2), (5, "a:2,b:2,c:2", 3), (9, "a:4,b:4", 2)],
)
def test_hosts_are_filled_in_their_order_and_those_beyond_are_spares(number, hosts, used):
    found = hosts_of(hosts.split(","))
    assert split_spares(number, found) == (found[:used], found[used:])


@pytest.mark.parametrize(("number", "hosts"), [(None, "a:2,b:2"), (2, "a:2,b"), (1, "a,b")])
def test_without_a_number_of_processes_or_slots_no_host_is_a_spare(number, hosts):
    found = hosts_of(hosts.split(","))
    assert split_spares(number, found) == (found, ())


def test_the_first_spare_with_room_takes_the_place_of_a_lost_node_which_is_the_last_spare_then():
    change = replace_lost(ROSTER, ROSTER.nodes_of([4]))
    assert change is not None
    assert change.roster == NodeRoster(("a", "b", "e"), (2, 1, 2), (Host("d", 1), Host("c", 2)))
    assert change.text == "node c was lost; ranks 3-4 start again on e"


def test_two_lost_nodes_need_two_spares_with_room():
    change = replace_lost(ROSTER, ROSTER.nodes_of([0, 2]))
    assert change is not None
    assert change.roster.names == ("e", "d", "c")
    assert change.text == "node a was lost; ranks 0-1 start again on e; node b was lost; rank 2 starts again on d"
    assert replace_lost(ROSTER, [0, 2]) is None


def test_a_spare_that_can_not_be_reached_is_passed_over():
    roster = NodeRoster(("a", "b"), (1, 1), (Host("c", 1), Host("d", 1)))
    change = reachable_change(roster, [1], lambda name: name != "c")
    assert change is not None
    assert change.roster.names == ("a", "d")
    assert reachable_change(roster, [1], lambda _: False) is None
    assert reachable_change(roster, [], lambda _: True) is None


def test_a_spare_needs_the_devices_of_the_others():
    placement = Placement("supervisor", 2, cpu=False, why="", kind="cuda")
    check_spares(placement, [Host("c", 2)], [facts("cuda", 2)])
    for found in (facts(), facts("cuda", 1)):
        with pytest.raises(LaunchError, match="c:2 is a spare"):
            check_spares(placement, [Host("c", 2)], [found])
    check_spares(Placement("supervisor", 2, cpu=True, why=""), [Host("c", 2)], [facts()])


def test_a_spare_without_slots_has_room_for_any_node_as_far_as_its_devices_allow():
    spares, found = [Host("c"), Host("d", 1)], [facts("cuda", 2), facts("cuda", 2)]
    on_cpu = Placement("supervisor", 5, cpu=True, why="")
    assert spares_with_slots(on_cpu, (4, 1), spares, found) == (Host("c", 4), Host("d", 1))
    on_gpus = Placement("supervisor", 5, cpu=False, why="", kind="cuda")
    assert spares_with_slots(on_gpus, (4, 1), spares, found) == (Host("c", 2), Host("d", 1))


def test_fewer_nodes_keep_their_number_of_ranks_as_long_as_the_fewest_are_left():
    change = leave_out(ROSTER, [0], min_nodes=2)
    assert change is not None
    assert change.roster == NodeRoster(("b", "c"), (1, 2), ROSTER.spares)
    assert change.text == "node a was lost; 3 of 5 ranks start again, on b, c"
    assert leave_out(ROSTER, [0], min_nodes=3) is None
    assert leave_out(ROSTER, [0], min_nodes=None) is None
    assert leave_out(ROSTER, [0, 1, 2], min_nodes=1) is None


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
        check_min_nodes(config, ["a", "b"])
