"""How busy TPUs are is read from a real server of tpu-info's protocol; the chip is the only thing that is made up."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from accelerate_nb.devices import tpu_info
from accelerate_nb.devices.tpu_info import TpuGauge
from accelerate_nb.devices.usage import RankProcesses
from accelerate_nb.events.run_state import RunState
from accelerate_nb.launching.resource_monitor import monitor_resources
from tests.devices.chips import GIB, Chips, served
from tests.waiting import until


def of(size: int) -> RankProcesses:
    return RankProcesses(size, {}, 0)


@pytest.fixture
def serving() -> Iterator[Callable[..., int]]:
    """Serves what chips say, until the test has ended; gives the port."""
    pytest.importorskip("tpu_info", reason="tpu-info is not installed here: `make test-tpu` has it")
    with served() as start:
        yield start


def test_each_rank_shows_its_own_chip(serving):
    # the runtime numbers its devices in the whole slice of a pod, not on this machine
    chips = Chips(used={8: 7 * GIB, 9: 1, 12: 2, 13: 3}, total=dict.fromkeys((8, 9, 12, 13), 16 * GIB))
    chips.busy = {8: 42.5, 9: 0.0, 12: 100.0, 13: 1.0}
    tpus = TpuGauge({"TPU_RUNTIME_METRICS_PORTS": str(serving(chips))})
    found = list(tpus.samples(of(4), 5.0))
    assert [(item.rank, item.device, item.utilisation, item.memory_used) for item in found] == [
        (0, "TPU 0", 42.5, 7 * GIB),
        (1, "TPU 1", 0.0, 1),
        (2, "TPU 2", 100.0, 2),
        (3, "TPU 3", 1.0, 3),
    ]
    assert {(item.memory_total, item.time) for item in found} == {(16 * GIB, 5.0)}
    tpus.close()


def test_they_are_the_numbers_that_the_library_itself_reads(serving):
    from tpu_info.device import TpuChip
    from tpu_info.metrics import get_chip_usage

    chips = Chips(used={0: 1, 1: 2}, total=dict.fromkeys(range(2), 16 * GIB), busy={0: 10.0, 1: 20.0})
    port = serving(chips)
    theirs = get_chip_usage(TpuChip.V5E, f"localhost:{port}")
    tpus = TpuGauge({"TPU_RUNTIME_METRICS_PORTS": str(port)})
    ours = [(item.memory_used, item.memory_total, item.utilisation) for item in tpus.samples(of(2), 0.0)]
    assert ours == [tuple(item)[1:] for item in theirs]
    tpus.close()


@pytest.mark.parametrize("reports_all_chips", [True, False])
def test_processes_of_one_chip_each_are_queried_at_their_ports(serving, reports_all_chips):
    ports = []
    for number in range(2):
        numbers = {n: n for n in (range(2) if reports_all_chips else [number])}
        ports.append(serving(Chips(used=numbers, total=dict.fromkeys(numbers, 9), busy=numbers)))
    tpus = TpuGauge({"TPU_RUNTIME_METRICS_PORTS": ",".join(map(str, ports))})
    assert [(sample.rank, sample.memory_used) for sample in tpus.samples(of(2), 0.0)] == [(0, 0), (1, 1)]
    tpus.close()


def test_where_nothing_is_served_nothing_is_known_or_reported(serving, capfd):
    tpus = TpuGauge({"TPU_RUNTIME_METRICS_PORTS": "1"})
    for _ in range(3):
        assert list(tpus.samples(of(2), 0.0)) == []
    tpus.close()
    assert list(tpus.samples(of(2), 0.0)) == []
    assert capfd.readouterr() == ("", "")


def test_the_way_to_the_internet_is_not_taken(serving, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    tpus = TpuGauge({"TPU_RUNTIME_METRICS_PORTS": str(serving(Chips(used={0: 1}, total={0: 2})))})
    assert len(list(tpus.samples(of(1), 0.0))) == 1
    tpus.close()


def test_a_service_that_begins_later_is_found(serving):
    chips = Chips(used={0: 1}, total={0: 2}, busy={0: 3.0}, closed=True)
    tpus = TpuGauge({"TPU_RUNTIME_METRICS_PORTS": str(serving(chips))})
    assert list(tpus.samples(of(1), 0.0)) == []
    chips.closed = False
    assert len(list(tpus.samples(of(1), 0.0))) == 1
    tpus.close()


def test_a_service_that_does_not_answer_is_given_up_for_this_time(serving, monkeypatch):
    chips = Chips(used={0: 1}, total={0: 2}, busy={0: 3.0})
    tpus = TpuGauge({"TPU_RUNTIME_METRICS_PORTS": str(serving(chips))})
    with ThreadPoolExecutor(1) as other:
        chips.waits.clear()
        # a test that hangs is ended; that it waits no longer is the promise
        assert other.submit(lambda: list(tpus.samples(of(1), 0.0))).result(30) == []
        chips.waits.set()
    assert len(list(tpus.samples(of(1), 0.0))) == 1
    tpus.close()


def test_a_run_knows_how_busy_its_chips_are(serving, tmp_path):
    chips = Chips(used={0: 7 * GIB, 1: 8 * GIB}, total={0: 16 * GIB, 1: 16 * GIB}, busy={0: 42.0, 1: 43.0})
    view = RunState(2)
    environment = {"PJRT_DEVICE": "TPU", "TPU_RUNTIME_METRICS_PORTS": str(serving(chips))}
    with monitor_resources(view, lambda: range(2), "xla", environment, [tmp_path]):
        until(lambda: view.rank(1).devices)
    assert view.rank(1).devices["TPU 1"].utilisation == 43.0


def test_without_the_library_no_chip_is_known(monkeypatch):
    monkeypatch.setattr(tpu_info, "find_spec", lambda name: None)
    tpus = TpuGauge({})
    assert list(tpus.samples(of(2), 0.0)) == []
    tpus.close()


def test_what_the_service_leaves_out_is_not_known(serving):
    port = serving(Chips(used={0: 1, 1: 2}, total={0: 9}, busy={1: 2.0}))
    tpus = TpuGauge({"TPU_RUNTIME_METRICS_PORTS": str(port)})
    found = [(item.memory_used, item.memory_total, item.utilisation) for item in tpus.samples(of(2), 0.0)]
    assert found == [(1, 9, None), (2, None, 2.0)]
    tpus.close()
