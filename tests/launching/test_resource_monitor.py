"""While a run goes on its view knows how busy the machine is, and each rank."""

import os
import threading
import time
from pathlib import Path

import pytest

from accelerate_nb import launch
from accelerate_nb.events.event_types import StateChange
from accelerate_nb.events.run_state import RunState
from accelerate_nb.launching.resource_monitor import monitor_resources
from tests.waiting import until

SETTINGS = {"cpu": True, "config_file": "", "timeout": 60, "panel": "off"}


def computes_until(path):
    while not Path(path).exists():
        sum(range(1000))


def samplers():
    return [thread for thread in threading.enumerate() if thread.name == "accelerate_nb samples"]


def test_a_run_knows_how_busy_its_ranks_are(tmp_path):
    go = tmp_path / "go"
    run = launch(computes_until, (str(go),), num_processes=2, folder=str(tmp_path / "runs"), **SETTINGS)

    def known():
        devices = [item.devices.get("cpu") for item in run.view.glances()]
        return all(device is not None and device.utilisation for device in devices)

    until(known)
    host = run.view.host
    assert host.memory[0] <= host.memory[1]
    for item in run.view.glances():
        device = item.devices["cpu"]
        assert 0 < device.utilisation <= 100
        assert 1 << 20 < device.memory_used < device.memory_total == host.memory[1]
    go.touch()
    run.wait(60)
    assert "Sample" not in (run.folder / "events.jsonl").read_text()
    assert samplers() == []


@pytest.mark.parametrize(
    ("kind", "environment", "details", "known"),
    [
        # a rank in this process has no number of one, and the other has not begun
        ("cpu", {}, [""], [0]),
        # ranks that compute through torch_xla on the CPU are their processes
        ("xla", {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}, [str(os.getpid())] * 2, [0, 1]),
    ],
)
def test_a_rank_is_known_by_its_process_once_it_has_begun(kind, environment, details, known, tmp_path):
    view = RunState(2)
    for rank, detail in enumerate(details):
        view.apply(StateChange(rank, "running", time.time(), detail))
    with monitor_resources(view, lambda: range(2), kind, environment, [tmp_path]):
        until(lambda: view.rank(known[-1]).devices)
    assert [rank for rank in range(2) if view.rank(rank).devices] == known
    assert all(view.rank(rank).devices["cpu"].memory_used > 1 << 20 for rank in known)
    assert samplers() == []


def test_a_run_of_a_moment_is_not_looked_at_and_a_device_that_cannot_be_queried_is_not_known(tmp_path):
    view = RunState(1)
    view.apply(StateChange(0, "running", time.time()))
    with monitor_resources(view, lambda: range(1), "mps", {}, [tmp_path]):
        pass
    assert view.host is None
    assert samplers() == []
    with monitor_resources(view, lambda: range(1), "mps", {}, [tmp_path]):
        until(lambda: view.host)
    assert view.rank(0).devices == {}
