"""The load of TPUs by the service of the process that computes on them: no chip is woken by the query."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias

from accelerate_nb.devices.usage import DeviceGauge, RankProcesses
from accelerate_nb.events.event_types import DeviceSample

# Where libtpu serves its numbers by default: a port for each of its processes (`tpu_info/metrics.py`).
_VARIABLE, _PORTS = "TPU_RUNTIME_METRICS_PORTS", "8431"
_TOTAL = "tpu.runtime.hbm.memory.total.bytes"
_USED = "tpu.runtime.hbm.memory.usage.bytes"
_BUSY = "tpu.runtime.tensorcore.dutycycle.percent"
# All ports are queried at once, and none is waited for longer: the service is on this machine.
_TIMEOUT = 0.5
# The used and all memory of a device in bytes, and how busy it is in percent.
TpuLoad: TypeAlias = tuple[int, int | None, float | None]


class TpuGauge(DeviceGauge):
    """The TPUs of this machine on which ranks compute, by number, until `close`; none without the package `tpu-info`."""

    # libtpu serves the numbers once a process computes; with several processes any reports all (some versions: its own)

    def __init__(self, environment: Mapping[str, str]) -> None:
        # the channel to each process, and its metrics
        self._services: list[tuple[Any, Any]] = []
        if find_spec("tpu_info") is None or find_spec("grpc") is None:
            return
        import grpc
        from tpu_info.proto.tpu_metric_service_pb2_grpc import RuntimeMetricServiceStub

        # what a notebook needs to reach the internet is not for this machine
        options = [("grpc.enable_http_proxy", 0)]
        for port in map(str.strip, (environment.get(_VARIABLE) or _PORTS).split(",")):
            if port.isdecimal():
                channel = grpc.secure_channel(f"localhost:{port}", grpc.local_channel_credentials(), options)
                self._services.append((channel, RuntimeMetricServiceStub(channel)))

    def samples(self, ranks: RankProcesses, now: float) -> Iterator[DeviceSample]:
        # all processes are queried before any reply is waited for
        queries = [_query(metrics) for _, metrics in self._services]
        known: dict[int, TpuLoad] = {}
        for futures in queries:
            known = cores(*map(_reply, futures)) | known
        for rank, (_, (used, total, busy)) in enumerate(sorted(known.items())[: ranks.size]):
            yield DeviceSample(rank, f"TPU {rank}", busy, used, total, now)

    def close(self) -> None:
        for channel, _ in self._services:
            channel.close()
        self._services = []


def _query(metrics: Any) -> list[Any]:
    from tpu_info.proto.tpu_metric_service_pb2 import MetricRequest

    names = (_USED, _TOTAL, _BUSY)
    return [metrics.GetRuntimeMetric.future(MetricRequest(metric_name=name), timeout=_TIMEOUT) for name in names]


def _reply(future: Any) -> dict[int, Any]:
    """The number of each device."""
    from grpc import RpcError

    try:
        return {metric.attribute.value.int_attr: metric.gauge for metric in future.result().metric.metrics}
    except RpcError:
        # nothing computes, the device does not report this, or the process is too busy to reply
        return {}


def cores(used: Mapping[int, Any], total: Mapping[int, Any], busy: Mapping[int, Any]) -> dict[int, TpuLoad]:
    """The load of each device by the service, in the order of their numbers; a device is a chip, as torch_xla counts them."""
    return {
        number: (
            int(used[number].as_int),
            int(total[number].as_int) if number in total else None,
            float(busy[number].as_double) if number in busy else None,
        )
        for number in sorted(used)
    }


def generation() -> str | None:
    """The generation of this machine's Google chip, such as "v5e"; `None` where tpu-info is not installed, or sees none."""
    if find_spec("tpu_info") is None:
        return None
    from tpu_info.device import get_local_chips

    try:
        chip, _ = get_local_chips()
    except (OSError, AssertionError):
        # a device of the bus that does not describe itself, and chips of several kinds, which it does not expect
        return None
    return None if chip is None else str(chip.value.name)
