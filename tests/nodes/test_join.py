"""Hosts that join by the line that a launch shows, each with an address of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accelerate_nb import launch
from accelerate_nb.launching.nodes import node_pool
from tests.nodes.hosts import Hosts
from tests.nodes.test_ssh import place
from tests.nodes.trainings import TWO_NODES
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def machines(hosts: Hosts) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    node_pool.close_nodes()
    for machine in started:
        machine.terminate()
        machine.communicate(timeout=20)


def test_hosts_that_join_run_a_launch(
    hosts: Hosts, machines: list[subprocess.Popen[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = re.sub(r"\d+$", "254", hosts.addresses["h1"])
    joining = {"engine": "join", "join_address": here, "join_timeout": 60.0}
    settings = {**TWO_NODES, **joining, "folder": str(tmp_path), "results": "all"}
    with ThreadPoolExecutor(1) as threads:
        launched = threads.submit(lambda: launch(place, **settings).wait())
        shown = ""

        def tickets() -> list[str]:
            nonlocal shown
            assert not launched.done(), launched.result()
            shown += capsys.readouterr().err
            return re.findall(r"^accelerate-nb join (\S+)$", shown, flags=re.MULTILINE)

        until(tickets, timeout=20)
        for host in ("h1", "h2"):
            words = (sys.executable, "-m", "accelerate_nb", "join", tickets()[0], "--name", host)
            machines.append(hosts.start(host, *words))
        found_places = launched.result()
    assert {item["GLOO_SOCKET_IFNAME"] for item in found_places} == {"eth0"}
    assert {item["MASTER_ADDR"] for item in found_places} < set(hosts.addresses.values())
