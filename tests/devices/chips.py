"""A real server of the protocol in which libtpu tells how busy TPUs are; the chips, and their numbers, are made up."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass
class Chips:
    """What is told: memory of each device, how busy it is of each chip; `closed` refuses, and without `waits` none comes."""

    used: dict[int, int]
    total: dict[int, int]
    busy: dict[int, float] = field(default_factory=dict)
    closed: bool = False
    waits: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.waits.set()


@contextmanager
def served() -> Iterator[Callable[[Chips], int]]:
    """Inside, what some chips tell can be served; the port is given."""
    import grpc
    from tpu_info.proto import tpu_metric_service_pb2 as messages, tpu_metric_service_pb2_grpc as service

    class Servicer(service.RuntimeMetricServiceServicer):
        def __init__(self, chips: Chips) -> None:
            self.chips = chips

        def GetRuntimeMetric(self, request, context):
            self.chips.waits.wait(60)
            if self.chips.closed:
                context.abort(grpc.StatusCode.UNAVAILABLE, "nobody computes")
            values = {
                "tpu.runtime.hbm.memory.usage.bytes": self.chips.used,
                "tpu.runtime.hbm.memory.total.bytes": self.chips.total,
                "tpu.runtime.tensorcore.dutycycle.percent": self.chips.busy,
            }[request.metric_name]
            metrics = [metric(*item) for item in reversed(values.items())]
            return messages.MetricResponse(metric=messages.TPUMetric(name=request.metric_name, metrics=metrics))

    def metric(number: int, value: float) -> messages.Metric:
        gauge = messages.Gauge(as_double=value) if isinstance(value, float) else messages.Gauge(as_int=value)
        device = messages.Attribute(key="device-id", value=messages.AttrValue(int_attr=number))
        return messages.Metric(attribute=device, gauge=gauge)

    with ExitStack() as stack:

        def start(chips: Chips) -> int:
            pool = stack.enter_context(ThreadPoolExecutor(8))
            server = grpc.server(pool)
            service.add_RuntimeMetricServiceServicer_to_server(Servicer(chips), server)
            port = server.add_secure_port("localhost:0", grpc.local_server_credentials())
            server.start()
            stack.callback(lambda: server.stop(None).wait())
            return port

        yield start
