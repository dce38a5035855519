"""Several ranks in one process, as on TPUs v2 and v3: each is a thread with its own output, state and result."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import warnings

import pytest

from accelerate_nb import Accelerator, LaunchError, WorkerError, launch
from accelerate_nb.config.run_config import resolve
from accelerate_nb.launching.session.session import Session

SIZE = 2


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a function on two ranks that are threads of one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        patch.setenv("CPU_NUM_DEVICES", str(SIZE))
        folder = str(tmp_path_factory.mktemp("runs"))

        def start(function, *args, **settings):
            options = {"config_file": "", "folder": folder, "results": "all", "panel": "off", **settings}
            return launch(function, args, num_processes=SIZE, **options)

        yield start


# ------------------------------------------------------------------------------------------------ what is a rank's own


def breaks():
    raise ValueError("in a thread")


def speaks(captured):
    from tqdm import tqdm

    name = f"rank {os.environ['RANK']}"
    print(name, "prints")
    logging.getLogger("training").warning("%s logs", name)
    warnings.warn(f"{name} warns", stacklevel=1)
    sys.stderr.write(f"{name} writes\n")
    for work in (lambda: print(name, "prints in a thread"), breaks):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    for _ in tqdm(range(3), desc=f"bar of {name}", mininterval=0):
        pass
    display({"text/plain": f"{name} shows"}, raw=True)  # noqa: F821 - workers have it
    captured.append(name)
    accelerator = Accelerator()
    accelerator.log({"number": accelerator.process_index})
    state = accelerator.state, accelerator.gradient_state
    accelerator.gradient_state.sync_gradients = name == "rank 0"
    accelerator.wait_for_everyone()
    return {
        "pid": os.getpid(),
        "captured": captured,
        "rank": (accelerator.process_index, accelerator.num_processes, str(accelerator.device)),
        "states": tuple(map(id, (*state, state[0].__dict__, state[1].__dict__))),
        "synchronises": accelerator.gradient_state.sync_gradients,
        "variables": {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
        "listed": [dict(os.environ)["RANK"], os.environ.copy()["LOCAL_RANK"], "RANK" in os.environ],
    }


@pytest.fixture(scope="module")
def spoken(start):
    """One run in which each rank speaks in many ways."""
    run = start(speaks, ["common"])
    run.wait(110)
    return run


def test_the_ranks_share_a_process_and_have_a_device_each(spoken):
    assert len({result["pid"] for result in spoken.results}) == 1
    assert [result["rank"] for result in spoken.results] == [(0, 2, "xla:0"), (1, 2, "xla:1")]


@pytest.mark.parametrize(
    "line",
    [
        "rank {} prints",
        "rank {} logs",
        "UserWarning: rank {} warns",
        "rank {} writes",
        "rank {} prints in a thread",
        "bar of rank {}: 100%",
    ],
)
def test_what_a_rank_prints_is_under_its_rank_alone(spoken, line):
    for rank in range(SIZE):
        text = spoken.logs(rank)
        assert line.format(rank) in text
        assert line.format(1 - rank) not in text


def test_an_exception_in_a_thread_of_a_rank_is_reported_under_the_rank(spoken):
    for rank in range(SIZE):
        assert spoken.logs(rank).count("ValueError: in a thread") == 1


def test_bars_numbers_and_what_is_displayed_come_under_their_rank(spoken):
    for rank in range(SIZE):
        seen = spoken.view.rank(rank)
        assert {bar.label for bar in seen.progress.values()} == {f"bar of rank {rank}"}
        assert {bar.bar for bar in seen.progress.values()} == {"tqdm 0"}
        assert [metric.value for metric in seen.series["number"]] == [rank]
    events = (spoken.folder / "events.jsonl").read_text().splitlines()
    for rank in range(SIZE):
        assert any(json.loads(line).get("rank") == rank and f"rank {rank} shows" in line for line in events)


def test_what_a_function_captures_and_the_states_of_accelerate_are_each_rank_s_own(spoken):
    assert [result["captured"] for result in spoken.results] == [["common", f"rank {rank}"] for rank in range(SIZE)]
    assert not set(spoken.results[0]["states"]) & set(spoken.results[1]["states"])
    assert [result["synchronises"] for result in spoken.results] == [True, False]


def test_the_environment_shows_each_thread_which_rank_it_is(spoken):
    for rank, found in enumerate(spoken.results):
        assert found["variables"] == {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        assert found["listed"] == [str(rank), str(rank), True]


# --------------------------------------------------------------------------------------------------------------- errors


def fails(on_rank):
    from accelerate_nb.runtime.xla import device as xla

    accelerator = Accelerator()
    for _ in range(3):
        xla.sync()
    if accelerator.process_index == on_rank:
        raise LookupError("the cause")
    for _ in range(1000):
        xla.sync()


def test_the_error_of_one_rank_names_it_and_those_that_wait_for_it_are_freed(start):
    with pytest.raises(LookupError, match="rank 1 stopped with LookupError: the cause") as caught:
        start(fails, 1).wait(110)
    assert 'raise LookupError("the cause")' in str(caught.value)
    assert caught.value.rank == 1
    (other,) = [failure for failure in caught.value.failures if failure.rank == 0]
    assert other.lost_connection


def kills_the_process():
    print("here", flush=True)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(60)


def test_a_process_that_is_killed_ends_its_ranks_and_is_reported_once(start):
    with pytest.raises(WorkerError, match="rank 0 ended with SIGKILL") as caught:
        start(kills_the_process).wait(110)
    assert str(caught.value).count("SIGKILL") == 1
    assert [failure.exit_code for failure in caught.value.failures] == [-signal.SIGKILL] * SIZE


# ------------------------------------------------------------------------------------------------------ ending from outside


def computes_for_ever():
    print("here", flush=True)
    number = 0
    while True:
        number += 1


def until_it_speaks(run):
    pause = threading.Event()
    while not all(run.view.rank(rank).lines for rank in range(SIZE)):
        assert not run.done
        pause.wait(0.01)


def test_an_interrupt_reaches_the_python_of_every_rank_and_stacks_name_them_before(start):
    run = start(computes_for_ever, stop_grace_period=20)
    until_it_speaks(run)
    stacks = run.stacks()
    assert stacks.count("in computes_for_ever") == SIZE
    run.request_stop("interrupt")
    with pytest.raises((WorkerError, KeyboardInterrupt)):
        run.wait(60)
    failures = [run.view.rank(rank).failure for rank in range(SIZE)]
    assert [failure.type for failure in failures] == ["KeyboardInterrupt"] * SIZE


def trains_for_ever():
    import torch

    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.ones(2, 4, device=accelerator.device)
    print("here", flush=True)
    while True:
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()


def test_ranks_stop_after_the_same_step(start):
    run = start(trains_for_ever, stop_grace_period=20)
    until_it_speaks(run)
    run.request_stop("finish")
    with pytest.raises(WorkerError):
        run.wait(60)
    failures = [run.view.rank(rank).failure for rank in range(SIZE)]
    assert [failure.type for failure in failures] == ["StopRequested"] * SIZE
    assert len({failure.message for failure in failures}) == 1


# ---------------------------------------------------------------------------------------------------------- much, and often


def floods(lines):
    for number in range(lines):
        print("flood", os.environ["RANK"], number)


def test_a_flood_of_output_of_both_ranks_arrives_whole(start):
    run = start(floods, 20_000)
    run.wait(110)
    for rank in range(SIZE):
        assert run.log_file(rank).read_text() == "".join(f"flood {rank} {number}\n" for number in range(20_000))


def belongings():
    return sorted(thread.name for thread in threading.enumerate()), len(os.listdir("/proc/self/fd"))


def says_its_rank():
    return os.environ["RANK"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_launches_leave_nothing_behind(start):
    start(says_its_rank).wait(110)
    before = belongings()
    for _ in range(50):
        assert start(says_its_rank).wait(110) == ["0", "1"]
    assert belongings() == before


def test_what_is_captured_is_each_rank_s_own_also_where_workers_are_forked_from_here(start):
    seen = ["common"]

    def remembers():
        seen.append(os.environ["RANK"])
        return seen

    assert start(remembers, start_method="fork").wait(110) == [["common", "0"], ["common", "1"]]
    assert seen == ["common"]


def test_a_session_on_threads_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(LaunchError, match="Pass num_processes=1"):
        Session.start(resolve({"num_processes": 2}, {}))


def counters() -> list[str]:
    """The counters of torch_xla that there are when a rank begins."""
    import torch_xla.debug.metrics as metrics

    return list(metrics.counter_names())


def test_the_first_value_is_read_before_threads_could_read_it_at_once(on_xla):
    # the counter that the first read makes is unprotected: two threads that make it together end the process, now and then
    assert all("aten::_local_scalar_dense" in names for names in on_xla(counters, num_processes=2))
