"""Which gauge tells how busy the devices of a run's ranks are."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate_nb.devices.gauges import Gauge, Unknown
from accelerate_nb.devices.nvml import Gpus
from accelerate_nb.devices.sampling import WorkerGauge
from accelerate_nb.devices.tpu_info import Tpus


def gauge_of(kind: str, size: int, environment: Mapping[str, str]) -> Gauge:
    """The gauge for `size` ranks on devices of a kind, "cpu" or torch's name for an accelerator, in this environment."""
    if kind == "xla":
        # torch_xla computes on the CPU too, and writes there what it computes on where nobody has said it
        kind = "cpu" if environment.get("PJRT_DEVICE", "").upper() == "CPU" else "tpu"
    if kind == "cpu":
        return WorkerGauge(size)
    if kind == "cuda":
        return Gpus(environment)
    return Tpus(environment) if kind == "tpu" else Unknown()
