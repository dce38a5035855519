"""What several nodes cost: a warm launch of 2 x 2 ranks on one machine, on two agents of it, and on two hosts that ssh reaches."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accelerate_nb import launch
from accelerate_nb.launching.nodes import node_pool
from tests.bench.rows import Row, print_rows
from tests.nodes.hosts import Hosts, made_hosts

RANKS = 4


def main() -> None:
    """Measure the ways that this machine allows, in turns, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how often each launch is made; they take turns")
    parser.add_argument("--json", action="store_true", help="print numbers for a program")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    load = os.getloadavg()[0]
    with ExitStack() as made:
        folder = Path(made.enter_context(tempfile.TemporaryDirectory()))
        ways: dict[str, dict[str, object]] = {"one machine": {}, "two agents here": {"num_nodes": 2, "engine": "local"}}
        if (hosts := hosts_of(made, folder)) is not None:
            ways["two hosts by ssh"] = {"hosts": list(hosts.addresses), "ssh_command": hosts.ssh_command}
        made.callback(node_pool.close_nodes)
        rows = measure({name: way(settings, folder) for name, settings in ways.items()}, arguments.rounds)
    print_rows(rows, load, as_json=arguments.json, decimals=1, rounds=arguments.rounds)


def hosts_of(made: ExitStack, folder: Path) -> Hosts | None:
    """Two hosts out of network namespaces; `None`, which is said, where there can be none."""
    try:
        return made.enter_context(made_hosts(2, folder))
    except pytest.skip.Exception as reason:
        print(f"without hosts: {reason}")
        return None


def measure(ways: dict[str, Callable[[], float]], rounds: int) -> list[Row]:
    """The median of each way, and its ratio to one machine."""
    cold = {name: way() for name, way in ways.items()}
    for way in ways.values():
        way()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(ways[name]())
    middle = {name: statistics.median(found) for name, found in taken.items()}
    rows = []
    for name in names:
        rows.append(
            Row(f"warm launch: {name}", middle[name], "ms", middle[name] / middle["one machine"], "one machine")
        )
        rows.append(Row("  first launch", cold[name], "ms"))
    return rows


def way(settings: dict[str, object], folder: Path) -> Callable[[], float]:
    """A launch with these settings, which gives the milliseconds from its call to an all-reduce that is done on every rank."""

    def once() -> float:
        begin = time.time()
        run = launch(
            rendezvous,
            num_processes=RANKS,
            cpu=True,
            config_file="",
            panel="off",
            results="all",
            folder=str(folder),
            **settings,
        )
        return 1e3 * (max(run.wait(120)) - begin)

    return once


def rendezvous() -> float:
    """The whole work of a rank: an all-reduce with the others, and when it was done."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    done = time.time()
    dist.destroy_process_group()
    return done


if __name__ == "__main__":
    main()
