"""What several nodes cost: a launch of 2 x 2 ranks on one machine, on agents that are kept or that ssh or Ray reach, and with peers."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from accelerate_nb import launch
from accelerate_nb.errors import MissingExtraError
from accelerate_nb.launching.nodes import node_pool
from tests.bench.node_peers import ray_cluster, ray_train, torchrun
from tests.bench.rank_moments import reduced
from tests.bench.rows import Row, compared, in_turns, main
from tests.nodes.hosts import Hosts, made_hosts

T = TypeVar("T")
RANKS = 4
# Launches of others take seconds.
_ROUNDS_OF_PEERS = 3


def on_this_machine(arguments: argparse.Namespace) -> list[Row]:
    with ExitStack() as made:
        folder = Path(made.enter_context(tempfile.TemporaryDirectory()))
        settings: dict[str, dict[str, object]] = {"one machine": {}}
        settings["two agents here"] = {"num_nodes": 2, "engine": "local"}
        hosts: Hosts | None = entered(made, "hosts", made_hosts(2, folder), pytest.skip.Exception)
        if hosts is not None:
            settings["two hosts by ssh"] = {"hosts": list(hosts.addresses), "ssh_command": hosts.ssh_command}
        peers: dict[str, Callable[[], float]] = {"torchrun": torchrun}
        if (address := entered(made, "Ray", ray_cluster(), MissingExtraError)) is not None:
            settings["two agents in Ray"] = {"num_nodes": 2, "engine": "ray", "address": address, "join_timeout": 60.0}
            peers["Ray Train"] = ray_train
        made.callback(node_pool.close_nodes)
        ways = {name: way(found, folder) for name, found in settings.items()}
        return [*measure(ways, arguments.rounds), *measure_peers(peers, lambda: ways["one machine"]().reduced)]


def entered(made: ExitStack, what: str, nodes: AbstractContextManager[T], missing: type[BaseException]) -> T | None:
    """Two nodes of a kind; `None`, which is said, where there can be none."""
    try:
        return made.enter_context(nodes)
    except missing as reason:
        print(f"without {what}: {reason}")
        return None


class TimedLaunch(NamedTuple):
    """The milliseconds from a launch to an all-reduce that is done on every rank, and until it has returned."""

    reduced: float
    returned: float


def measure(ways: dict[str, Callable[[], TimedLaunch]], rounds: int) -> list[Row]:
    cold = {name: way().reduced for name, way in ways.items()}
    for way in ways.values():
        way()
    taken = in_turns(ways, rounds)
    reduced = {name: [launch.reduced for launch in found] for name, found in taken.items()}
    rows = []
    for name, row in zip(taken, compared(reduced, "one machine", "ms", "warm launch: {}"), strict=True):
        rows.append(row)
        rows.append(Row("  until it has returned", statistics.median(found.returned for found in taken[name]), "ms"))
        rows.append(Row("  first launch", cold[name], "ms"))
    return rows


def measure_peers(ways: dict[str, Callable[[], float]], one_machine: Callable[[], float]) -> list[Row]:
    """The median of a few launches of each peer, which take seconds, and its ratio to ours between them."""
    taken = in_turns({"one machine": one_machine, **ways}, _ROUNDS_OF_PEERS)
    return compared(taken, "one machine", "ms", "launch: {}")[1:]


def way(settings: dict[str, object], folder: Path) -> Callable[[], TimedLaunch]:

    def once() -> TimedLaunch:
        begin = time.time()
        usual = {"num_processes": RANKS, "cpu": True, "config_file": "", "panel": "off", "results": "all"}
        run = launch(reduced, folder=str(folder), **usual, **settings)
        done = max(run.wait(120))
        return TimedLaunch(1e3 * (done - begin), 1e3 * (time.time() - begin))

    return once


if __name__ == "__main__":
    main(on_this_machine, __doc__, 15, decimals=1)
