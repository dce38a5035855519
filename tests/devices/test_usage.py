"""How busy the machine and its ranks are is measured against what they may use."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from accelerate_nb.devices import usage as machine_usage
from accelerate_nb.devices.cpu import cores
from accelerate_nb.devices.usage import HostGauge, RankProcesses, WorkerGauge, usage
from tests.waiting import until

GIB = 1 << 30
COMPUTES = "import sys\nprint(1, flush=True)\nwhile True: pass"


def test_the_machine_is_as_psutil_sees_it(tmp_path):
    found = HostGauge([tmp_path], tmp_path, tmp_path / "none").sample()
    memory = psutil.virtual_memory()
    assert 0 <= found.cpu <= 100
    assert found.memory[1] == memory.total
    assert found.memory[0] == pytest.approx(memory.total - memory.available, abs=GIB)
    disk = psutil.disk_usage(str(tmp_path))
    assert found.disk == pytest.approx((disk.used, disk.used + disk.free), abs=GIB)
    assert (found.shared_memory is not None) == Path("/dev/shm").exists()


def test_the_fullest_disk_is_shown_and_one_that_has_gone_is_not(tmp_path, monkeypatch):
    disks = {tmp_path / "a": (10, 100), tmp_path / "b": (90, 100), tmp_path / "gone": None}
    monkeypatch.setattr(machine_usage, "_disk", lambda folder: disks.get(folder))
    assert HostGauge(list(disks)).sample().disk == (90, 100)
    assert HostGauge([tmp_path / "gone"]).sample().disk is None


def groups(folder: Path, membership: str, files: dict[str, str]) -> HostGauge:
    for name, text in files.items():
        file = folder / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "membership").write_text(membership)
    return HostGauge([], folder / "cgroup", folder / "membership")


IN_VERSION_2 = {
    "box/memory.max": f"{2 * GIB}\n",
    "box/memory.current": f"{GIB}\n",
    "box/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n",
    "memory.max": "max\n",
}
IN_VERSION_1 = {
    "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
    "memory/memory.usage_in_bytes": f"{GIB}\n",
    "memory/memory.stat": f"total_inactive_file {GIB // 2}\n",
}
OLD_QUOTA = {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}
# of both limits, that of the group above is nearer
ABOVE = {"memory.max": f"{3 * GIB}", "memory.current": f"{2 * GIB}", "memory.stat": ""}
NEARER_ABOVE = {**IN_VERSION_2, "box/memory.current": "0", **ABOVE}


@pytest.mark.parametrize(
    ("membership", "files", "memory"),
    [
        ("0::/box\n", IN_VERSION_2, (GIB - GIB // 4, 2 * GIB)),
        ("4:memory:/box\n", IN_VERSION_1, (GIB // 2, 2 * GIB)),
        ("0::/box\n", NEARER_ABOVE, (2 * GIB, 3 * GIB)),
    ],
)
def test_a_container_has_the_memory_of_its_group_by_the_nearest_limit(tmp_path, membership, files, memory):
    assert groups(tmp_path, membership, files).memory() == memory


def test_no_limit_is_the_machine_itself(tmp_path):
    files = {"memory/memory.limit_in_bytes": str((1 << 63) - 4096), "memory/memory.usage_in_bytes": "5"}
    assert groups(tmp_path, "", files).memory()[1] == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("membership", "quota", "file", "unit"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, "cpu.stat", "usage_usec {:.0f}\n"),
        ("2:cpuacct:/\n1:cpu:/\n", OLD_QUOTA, "cpuacct/cpuacct.usage", "{:.0f}000"),
    ],
)
def test_a_container_s_cpu_is_its_share(tmp_path, monkeypatch, membership, quota, file, unit):
    monkeypatch.setattr(machine_usage.time, "monotonic", lambda: 100.0)
    gauge = groups(tmp_path, membership, {**quota, file: unit.format(0)})
    monkeypatch.setattr(machine_usage.time, "monotonic", lambda: 102.0)
    # half of a core is allowed, and a quarter of one was used
    (tmp_path / "cgroup" / file).write_text(unit.format(2 * 0.25 * 1e6))
    assert gauge.sample().cpu == pytest.approx(50)


@pytest.fixture
def computing():
    """A process that leads a session, as a worker does, with a child of its own; both compute."""
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {COMPUTES!r}])\n{COMPUTES}"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout.readline() == process.stdout.readline() == b"1\n"
    yield process
    os.killpg(process.pid, 9)
    process.wait()
    process.stdout.close()


def test_a_rank_is_its_process_with_those_that_it_started(computing):
    ours = usage([computing.pid, os.getpid()])
    assert len(ours[computing.pid]) == 2
    assert ours[computing.pid][0].memory > 1 << 20
    until(lambda: all(item.seconds > 0 for item in usage([computing.pid])[computing.pid]))
    everywhere = machine_usage._from_psutil(computing.pid)
    assert {item.pid for item in everywhere} == {our.pid for our in ours[computing.pid]}


def test_a_rank_that_computes_is_busy_and_one_that_waits_is_not(computing):
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    gauge = WorkerGauge(2)
    pids = {0: computing.pid, 1: idle.pid}
    assert [sample.utilisation for sample in gauge.samples(RankProcesses(2, pids, 7), 1.0)] == [None, None]
    before = usage([computing.pid])[computing.pid][0].seconds
    until(lambda: usage([computing.pid])[computing.pid][0].seconds > before + 0.2)
    busy, waiting = gauge.samples(RankProcesses(2, pids, 7), 2.0)
    assert (busy.rank, busy.device, busy.memory_total, busy.time) == (0, "cpu", 7, 2.0)
    assert busy.memory_used > 1 << 20
    assert 0 < busy.utilisation <= 100
    assert waiting.utilisation < busy.utilisation
    idle.communicate()
    assert gauge.samples(RankProcesses(2, {1: idle.pid}, 7), 3.0) == []


def test_a_rank_that_keeps_its_share_of_the_cores_busy_is_at_100(monkeypatch):
    gauge = WorkerGauge(1)
    seconds = iter([0.0, 1000.0 * cores()])
    monkeypatch.setattr(machine_usage, "usage", lambda pids: {1: [machine_usage.ProcessUsage(1, next(seconds), 5)]})
    gauge.samples(RankProcesses(1, {0: 1}, 7), 0.0)
    assert gauge.samples(RankProcesses(1, {0: 1}, 7), 0.0)[0].utilisation == 100.0
