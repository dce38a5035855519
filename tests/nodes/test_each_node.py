"""Hosts on each of which a run is launched find each other, as with torchrun, and tell each other what becomes of them."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accelerate_nb import launch
from tests.nodes.hosts import Hosts
from tests.nodes.test_ssh import LOST_WITHIN
from tests.nodes.trainings import trains

pytestmark = pytest.mark.timeout(400)

TRAINS = """
import json, os
from tests.nodes.trainings import trains
names = ("RANK", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
print(json.dumps([{name: os.environ[name] for name in names}, trains(3)]))
"""
FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
machine_rank: {rank}
main_process_ip: {address}
main_process_port: 29555
main_training_function: main
mixed_precision: 'no'
num_machines: 2
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: true
"""
REDUCES = """
import json, sys
import torch
from accelerate_nb import Accelerator, notebook_launcher

def reduces_for_ever():
    accelerator = Accelerator()
    print("reduces", flush=True)
    while True:
        accelerator.reduce(torch.ones(1000))

if __name__ == "__main__":
    notebook_launcher(reduces_for_ever, num_processes=1, num_nodes=2, cpu=True, panel="text", config_file="", **json.loads(sys.argv[1]))
"""


@contextmanager
def started(hosts: Hosts, commands: dict[str, list[str]]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A command on each host; none is left."""
    running = {host: hosts.start(host, sys.executable, *words) for host, words in commands.items()}
    try:
        yield running
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
            process.communicate()


def test_accelerate_s_files_on_two_hosts_train_to_the_weights_of_one_process(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    commands = {}
    for rank, host in enumerate(("h1", "h2")):
        (tmp_path / f"{host}.yaml").write_text(FILE.format(rank=rank, address=hosts.addresses["h1"]))
        flags = ["--config_file", str(tmp_path / f"{host}.yaml"), "--folder", str(tmp_path), "--quiet"]
        commands[host] = ["-m", "accelerate_nb.cli.main", "launch", *flags, str(tmp_path / "trains.py")]
    alone = launch(trains, (3,), num_processes=1, cpu=True, folder=str(tmp_path), panel="off", config_file="").wait()
    with started(hosts, commands) as running:
        printed = {host: process.communicate(timeout=80)[0] for host, process in running.items()}
    for rank, text in enumerate(printed.values()):
        # each host shows the lines of its own ranks
        found = [json.loads(line[line.index("[{") :]) for line in text.splitlines() if "[{" in line]
        assert len(found) == 1, printed
        place, weights = found[0]
        assert place["GROUP_RANK"] == place["RANK"] == str(rank)
        assert place["MASTER_ADDR"] == hosts.addresses["h1"]
        assert place["GLOO_SOCKET_IFNAME"] == "eth0"
        assert weights == pytest.approx(alone, abs=1e-6)


def test_a_host_that_is_cut_off_is_named_and_both_end(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "reduces.py").write_text(REDUCES)
    settings = {"master_addr": hosts.addresses["h1"], "use_port": 29557, "folder": str(tmp_path)}
    commands = {
        host: [str(tmp_path / "reduces.py"), json.dumps({**settings, **more})]
        for host, more in (("h1", {}), ("h2", {"node_rank": 1}))
    }
    with started(hosts, commands) as running:
        assert any("reduces" in line for line in running["h2"].stdout or ())
        began = time.monotonic()
        with hosts.cut("h2"):
            texts = [process.communicate(timeout=60)[0] for process in running.values()]
            assert time.monotonic() - began < LOST_WITHIN
    assert re.search(r"node 1 on \S+ was lost", texts[0]), texts[0]
    assert re.search(r"node 0 on \S+ was lost", texts[1]), texts[1]
