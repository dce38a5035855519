"""The thread that samples once a second how busy the machine is, and each rank of a run."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from msgspec import structs

from accelerate_nb.devices.nvml import GpuGauge
from accelerate_nb.devices.tpu_info import TpuGauge
from accelerate_nb.devices.usage import DeviceGauge, HostGauge, RankProcesses, WorkerGauge
from accelerate_nb.events.event_types import DeviceSample, HostSample
from accelerate_nb.events.run_state import RunState

_BETWEEN = 1.0
# Where there are thousands of processes a sample takes longer; it never takes more than this part of a core.
_PART = 0.01
# A run from which nothing else has come for a while, such as a session that nobody uses, is sampled less often.
_RESTS_AFTER = 60.0
_BETWEEN_AT_REST = 5.0


@contextmanager
def monitor_resources(
    view: RunState, ranks: Callable[[], range], kind: str, environment: Mapping[str, str], folders: list[Path]
) -> Iterator[None]:
    """A block in which what a view knows of the machine and its `ranks`, on devices of a kind, is as of about a second ago."""
    # samples go to the view alone: they are no sign of life of any rank, and would fill the run's folder
    over = threading.Event()

    def take_samples() -> None:
        # a run that is over by then is not sampled, and pays for no gauge; what one measures begins when it is made
        if over.wait(_BETWEEN / 2):
            return
        host, gauge = HostGauge(folders), gauge_of(kind, len(ranks()), environment)
        with closing(gauge):
            timeout, seen, moved = _BETWEEN / 2, -1, time.monotonic()
            while not over.wait(timeout):
                began = time.thread_time()
                if view.changes != seen:
                    moved = time.monotonic()
                load, own_pid = host.sample(), os.getpid()
                view.apply(load)
                # a rank in this very process reports no process, and runs from the first moment
                pids = {
                    glance.rank: int(glance.detail) if glance.detail.isdecimal() else own_pid
                    for glance in view.glances()
                    if glance.state == "running" or (glance.state == "starting" and glance.detail.isdecimal())
                }
                for sample in device_samples(gauge, ranks(), pids, load):
                    view.apply(sample)
                seen = view.changes
                rests = time.monotonic() - moved > _RESTS_AFTER
                timeout = max(_BETWEEN_AT_REST if rests else _BETWEEN, (time.thread_time() - began) / _PART)

    thread = threading.Thread(target=take_samples, name="accelerate_nb samples", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # a driver that does not respond keeps nobody waiting
        thread.join(_BETWEEN)


def device_samples(
    gauge: DeviceGauge, ranks: range, pids: Mapping[int, int], load: HostSample
) -> Iterator[DeviceSample]:
    """The load of the devices of a machine's ranks, whose processes are among `pids`, beside the machine's own."""
    local = {rank - ranks.start: pid for rank, pid in pids.items() if rank in ranks}
    for sample in gauge.samples(RankProcesses(len(ranks), local, load.memory[1]), load.time):
        yield structs.replace(sample, rank=ranks.start + sample.rank)


def gauge_of(kind: str, size: int, environment: Mapping[str, str]) -> DeviceGauge:
    """The gauge for `size` ranks on devices of a kind, "cpu" or torch's name for an accelerator, in this environment."""
    if size == 0:
        return DeviceGauge()
    if kind == "xla":
        # torch_xla computes on the CPU too, and writes there what it computes on where nobody has set it
        kind = "cpu" if environment.get("PJRT_DEVICE", "").upper() == "CPU" else "tpu"
    if kind == "cpu":
        return WorkerGauge(size)
    if kind == "cuda":
        return GpuGauge(environment)
    return TpuGauge(environment) if kind == "tpu" else DeviceGauge()
