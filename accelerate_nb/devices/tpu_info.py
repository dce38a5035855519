"""How busy TPUs are, asked of the service that the process computing on them offers: nobody wakes a chip by asking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from accelerate_nb.devices.gauges import Ranks
from accelerate_nb.events.model import DeviceSample

# Where libtpu serves its numbers unless it is told otherwise: a port for each of its processes (`tpu_info/metrics.py`).
_VARIABLE, _PORTS = "TPU_RUNTIME_METRICS_PORTS", "8431"
_TOTAL = "tpu.runtime.hbm.memory.total.bytes"
_USED = "tpu.runtime.hbm.memory.usage.bytes"
_BUSY = "tpu.runtime.tensorcore.dutycycle.percent"
# All ports are asked at once, and none is waited for longer: the service is on this machine.
_PATIENCE = 0.5


@dataclass(frozen=True, slots=True)
class Core:
    """One device as torch_xla counts them, which on v2 and v3 is half a chip: its memory, and how busy its chip is."""

    used: int | None
    total: int | None
    busy: float | None


class Tpus:
    """
    The TPUs of this machine on which ranks compute, in the order of their numbers: the first rank has the first.

    Where the package `tpu-info` is not installed, or no process serves the numbers, there are none. libtpu serves them once a
    process computes; with several processes any of them tells of all (some versions: of its own). Ends with its `close`.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._services = list(_services(environment.get(_VARIABLE) or _PORTS))

    def samples(self, ranks: Ranks, now: float) -> Iterator[DeviceSample]:
        """How busy each rank's device is, or all devices where one rank drives them all; nothing of ranks that have none."""
        found = self._cores()
        each = max(1, len(found) // max(1, ranks.size))
        for number, core in enumerate(found[: each * ranks.size]):
            yield DeviceSample(
                rank=number // each,
                device=f"TPU {number}",
                utilisation=core.busy,
                memory_used=core.used,
                memory_total=core.total,
                time=now,
            )

    def close(self) -> None:
        """Ask no more."""
        for service in self._services:
            service.close()
        self._services = []

    def _cores(self) -> list[Core]:
        asked = [service.ask() for service in self._services]
        known: dict[int, Core] = {}
        for answer in asked:
            for number, core in answer().items():
                known.setdefault(number, core)
        return [core for _, core in sorted(known.items())]


class _Service:
    """The metrics of one process; `grpc` and the library's own messages are handed in."""

    def __init__(self, grpc: Any, messages: Any, stub: Any, port: int) -> None:
        self._grpc, self._messages = grpc, messages
        # what a notebook needs to reach the internet is not for this machine
        options = [("grpc.enable_http_proxy", 0)]
        self._channel = grpc.secure_channel(f"localhost:{port}", grpc.local_channel_credentials(), options)
        self._stub = stub(self._channel)

    def ask(self) -> Any:
        """Send the questions; what comes back gives the answers, each device under its number, once they are there."""
        names = (_USED, _TOTAL, _BUSY)
        asked = [
            self._stub.GetRuntimeMetric.future(self._messages.MetricRequest(metric_name=name), timeout=_PATIENCE)
            for name in names
        ]
        return lambda: cores(*map(self._answer, asked))

    def close(self) -> None:
        self._channel.close()

    def _answer(self, asked: Any) -> dict[int, Any]:
        try:
            metrics = asked.result().metric.metrics
        except self._grpc.RpcError:
            # nobody computes, it computes on nothing that tells this, or it is too busy to answer
            return {}
        return {one.attribute.value.int_attr: one.gauge for one in metrics}


def cores(used: Mapping[int, Any], total: Mapping[int, Any], busy: Mapping[int, Any]) -> dict[int, Core]:
    """
    What the service says, for each device: memory is told of each, how busy it is of each chip.

    Where there are twice as many devices as chips, two are one chip's (`tpu_info.metrics.get_chip_usage`).
    """
    numbers = sorted(used)
    chips = [busy[number].as_double for number in sorted(busy)]
    on_each = len(numbers) // len(chips) if chips and len(numbers) % len(chips) == 0 else 0
    return {
        number: Core(
            used=int(used[number].as_int),
            total=int(total[number].as_int) if number in total else None,
            busy=float(chips[place // on_each]) if on_each else None,
        )
        for place, number in enumerate(numbers)
    }


def _services(ports: str) -> Iterable[_Service]:
    if find_spec("tpu_info") is None or find_spec("grpc") is None:
        return []
    import grpc
    from tpu_info.proto import tpu_metric_service_pb2 as messages
    from tpu_info.proto.tpu_metric_service_pb2_grpc import RuntimeMetricServiceStub as Stub

    return [_Service(grpc, messages, Stub, int(port)) for port in ports.split(",") if port.strip().isdecimal()]


def generation() -> str | None:
    """Which of Google's chips this machine has, such as "v5e"; `None` where tpu-info is not installed, or sees none."""
    if find_spec("tpu_info") is None:
        return None
    from tpu_info.device import get_local_chips

    try:
        chip, _ = get_local_chips()
    except (OSError, AssertionError):
        # a device of the bus that says nothing of itself, and chips of several kinds, which it does not expect
        return None
    return None if chip is None else str(chip.value.name)
