"""The load of a node and of its ranks' devices, sent to the process that conducts their run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import chain, repeat

from msgspec import structs

from accelerate_nb.devices.probe import probe
from accelerate_nb.devices.usage import HostGauge
from accelerate_nb.launching.resource_monitor import device_samples, gauge_of
from accelerate_nb.transport.messages import NodeLoad
from accelerate_nb.transport.worker_spec import WorkerSpec

# How often the load is sent after workers started, for the first times and from then on, in seconds.
_FIRST_SAMPLE, _QUICK_SAMPLES, _BETWEEN_SAMPLES = 1.0, 3, 5.0
# A sample that is being sent may wait for its reader, which has gone or doesn't read, in seconds.
_CLOSE_TIMEOUT = 2.0


class NodeSampler:
    """
    The thread that sends the load of a node every few seconds, and that of the devices of its ranks, until it is closed.

    `specs` are the workers of the node, and `pids` returns the processes of those that run, by their ranks.
    """

    def __init__(
        self,
        send: Callable[[NodeLoad], object],
        specs: Sequence[WorkerSpec],
        pids: Callable[[], Mapping[int, int]],
        first: float = _FIRST_SAMPLE,
    ) -> None:
        self._send, self._specs, self._pids, self._first = send, specs, pids, first
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="accelerate_nb samples", daemon=True)
        self._thread.start()

    def close(self, timeout: float = _CLOSE_TIMEOUT) -> None:
        """End it; nothing more is sent from then on, but what is on its way for longer than `timeout` seconds."""
        self._over.set()
        self._thread.join(timeout)

    def _sample(self) -> None:
        host, rank_info = HostGauge(()), self._specs[0].rank_info
        ranks = range(rank_info.rank, rank_info.rank + len(self._specs))
        environment = self._specs[0].process_environment.environ
        kind = "cpu" if environment.get("ACCELERATE_USE_CPU") == "true" else probe().kind
        waits = chain([self._first] * _QUICK_SAMPLES, repeat(_BETWEEN_SAMPLES))
        with closing(gauge_of(kind, len(ranks), environment)) as gauge:
            while not self._over.wait(next(waits)):
                load = host.sample()
                devices = tuple(device_samples(gauge, ranks, self._pids(), load))
                self._send(NodeLoad(structs.replace(load, node=rank_info.node_rank), devices))
