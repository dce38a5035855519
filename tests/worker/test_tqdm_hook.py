"""Whatever tqdm a function uses, its bars are the rank's bars."""

import multiprocessing
import sys
import time
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from textwrap import dedent

import numpy as np
import pytest
from tqdm import tqdm, trange

from accelerate_nb import launch
from accelerate_nb.events.event_types import Progress
from accelerate_nb.rank.event_sink import connect, outlet
from tests.processes import python
from tests.worker.test_logging_hooks import SETTINGS, trains


def listening(loop, *arguments):
    """In a worker: what the loop's bars said, as it would have been sent."""
    events = []

    class Listener:
        rank = outlet().rank

        def send(self, event):
            events.append(event)

    connect(Listener())
    loop(*arguments)
    return [event for event in events if isinstance(event, Progress)]


def progress_of(loop, *arguments, **settings):
    return launch(listening, (loop, *arguments), **{**SETTINGS, **settings}).wait(60)


def goes_through(name):
    module, _, class_name = name.rpartition(".")
    for _ in getattr(import_module(module), class_name)(range(4), desc="going"):
        time.sleep(0.06)


@pytest.mark.parametrize(
    "name",
    [
        "tqdm.tqdm",
        "tqdm.auto.tqdm",
        "tqdm.notebook.tqdm",
        "tqdm.notebook.tqdm_notebook",
        "tqdm.autonotebook.tqdm",
        "tqdm.asyncio.tqdm",
        "tqdm.rich.tqdm",
        "accelerate_nb.utils.tqdm",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_bar_of_any_kind_is_reported_from_its_beginning_to_its_end(name):
    first, *middle, last = progress_of(goes_through, name)
    assert (first.label, first.done, first.total, first.closed) == ("going", 0, 4, False)
    assert middle
    assert not any(item.closed for item in middle)
    assert (last.done, last.closed, last.bar) == (4, True, first.bar)
    assert 1 < last.rate < 17


def halts():
    bar = tqdm(total=100, desc="halted", mininterval=0)
    for _ in range(50):
        bar.update()
    # longer than it takes until all is told, and no longer than the bar is open
    time.sleep(0.5)
    kept.append(bar)


kept = []


def test_a_bar_that_halts_is_reported_as_it_was_drawn_last():
    first, *_, last = progress_of(halts)
    assert (first.done, last.done, last.closed) == (0, 50, False)


def short_ways():
    from tqdm import tnrange, trange
    from tqdm.auto import trange as auto
    from tqdm.notebook import trange as notebook

    for way in (trange, auto, notebook, tnrange):
        for _ in way(2, desc="short", mininterval=0):
            time.sleep(0.11)
        # a bar that follows at once is told of a moment later
        time.sleep(0.11)


@pytest.mark.filterwarnings("ignore")
def test_the_short_ways_are_bars_too():
    each = [(0, False), (1, False), (2, False), (2, True)]
    assert [(item.done, item.closed) for item in progress_of(short_ways)] == each * 4


@pytest.mark.parametrize("start_method", ["supervisor", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_bars_are_reported_however_the_worker_started(start_method):
    assert progress_of(goes_through, "tqdm.tqdm", start_method=start_method)[-1].closed


def test_tqdm_is_not_loaded_for_its_bars_and_is_reported_when_somebody_does():
    code = """
    import sys
    from accelerate_nb.rank.event_sink import connect
    from accelerate_nb.worker import tqdm_hook
    class Listener:
        rank = 3
        send = print
    connect(Listener())
    tqdm_hook.install()
    assert "tqdm" not in sys.modules
    from tqdm.notebook import tqdm
    from tqdm.auto import tqdm as auto
    tqdm(total=5, desc="late").close()
    auto(total=5, desc="later").close()
    import inspect
    inspect.getsource(tqdm)
    """
    printed = python("-c", dedent(code), limit=60, check=True).stdout
    assert "rank=3, label='late', done=0, total=5" in printed
    assert "closed=True" in printed


def nested():
    for _ in tqdm(range(3), desc="outer"):
        for _ in tqdm(range(2), desc="inner", leave=False, mininterval=0):
            time.sleep(0.11)


def test_nested_bars_keep_their_places():
    progress = progress_of(nested)
    bars = {item.label: {entry.bar for entry in progress if entry.label == item.label} for item in progress}
    assert len(bars["outer"]) == len(bars["inner"]) == 1
    assert bars["outer"] != bars["inner"]
    assert [item.done for item in progress if item.closed] == [2, 2, 2, 3]


def relabelled():
    bar = tqdm(total=100, desc="epoch 0", mininterval=0)
    for step in range(3):
        time.sleep(0.11)
        bar.set_description(f"epoch {step}")
        time.sleep(0.11)
        bar.set_postfix([("loss", step / 2)])
    bar.close()


def test_a_bar_that_is_relabelled_is_still_the_same_bar():
    progress = progress_of(relabelled)
    assert {item.bar for item in progress} == {"tqdm 0"}
    assert [item.label for item in progress] == [f"epoch {step}" for step in (0, 0, 0, 1, 1, 2, 2, 2)]
    assert progress[-1].note == "loss=1"


def many():
    for _ in range(2000):
        for _ in tqdm(range(3), mininterval=0, leave=False):
            pass
    for _ in tqdm(range(5000), mininterval=0):
        pass


def test_bars_are_reported_some_times_a_second_however_many_there_are():
    progress = progress_of(many)
    # each tenth of a second, or a little less, one that begins, moves and ends; twice that where a busy machine is late
    assert len(progress) <= 6 * (1 + (progress[-1].time - progress[0].time) / 0.09)


def scaled():
    with tqdm(total=4096, unit="MB", unit_scale=1 / 1024) as bar:
        bar.update(np.float64(4096))
    with tqdm(unit="B", unit_scale=True, desc="read: ") as bar:
        time.sleep(0.11)
        bar.update(10)


def test_numbers_are_those_that_the_bar_shows():
    progress = progress_of(scaled)
    first, second = (item for item in progress if item.closed)
    assert (first.done, first.total, first.unit, first.label) == (4.0, 4.0, "MB", "progress")
    assert (second.done, second.total, second.unit, second.label) == (10, None, "B", "read")


def draws():
    bar = tqdm(total=2, desc="drawn", bar_format="{desc}{n}/{total}", mininterval=0)
    bar.update()
    bar.update()
    bar.close()
    print("done", file=sys.stderr)


def test_a_finished_bar_leaves_one_line_in_the_rank_s_log_as_it_draws_itself(tmp_path):
    run = launch(draws, folder=str(tmp_path), **SETTINGS)
    run.wait(60)
    assert run.logs(0) == "drawn2/2\ndone\n"
    assert [line.text for line in run.view.tail(0, 100)] == ["drawn2/2", "done"]
    (bar,) = run.view.rank(0).progress.values()
    assert (bar.rank, bar.done, bar.closed) == (0, 2, True)


def on_two_levels():
    for epoch in tqdm(range(3), desc="outer", mininterval=0):
        for _ in tqdm(range(40), desc="inner", leave=False, mininterval=0):
            pass
        print("epoch", epoch, file=sys.stderr)


def on_three_levels():
    for _ in trange(2, desc="outer", mininterval=0):
        for _ in trange(3, desc="middle", mininterval=0):
            for _ in trange(3, desc="inner", mininterval=0):
                pass


def at_positions():
    first = tqdm(total=9, desc="first", position=1, mininterval=0, ascii=True)
    second = tqdm(total=9, desc="second", position=0, mininterval=0, leave=False)
    for _ in range(9):
        first.update()
        second.update()
    second.close()
    first.close()


def writes_between():
    for step in tqdm(range(3), desc="outer", colour="green", mininterval=0):
        for _ in tqdm(range(2), leave=False, mininterval=0):
            tqdm.write(f"written {step}", file=sys.stderr)
        sys.stderr.write(f"and {step}\n")


def leaves_no_line():
    for _ in tqdm(range(3), leave=False, mininterval=0):
        pass
    silent_bars()


def silent_bars():
    for _ in tqdm(range(3), disable=True):
        pass
    with tqdm(total=3, delay=60) as bar:
        bar.update(3)


def test_a_bar_that_nobody_would_see_sends_nothing():
    assert progress_of(silent_bars) == []


def fails_midway():
    try:
        for _ in tqdm(range(4), desc="outer", mininterval=0):
            for inner in tqdm(range(4), desc="inner", mininterval=0):
                if inner == 2:
                    raise ValueError("midway")
    except ValueError as error:
        print("caught", error)


@pytest.mark.parametrize(
    ("loop", "lines"),
    [
        (on_two_levels, ["epoch 0", "epoch 1", "epoch 2", "outer: 100%|██████████| 3/3"]),
        (on_three_levels, ["outer: 100%|██████████| 2/2"]),
        (at_positions, ["first: 100%|##########| 9/9"]),
        (
            writes_between,
            [f"{word} {step}" for step in range(3) for word in ("written", "written", "and")]
            + ["outer: 100%|\x1b[32m██████████\x1b[0m| 3/3"],
        ),
        (fails_midway, ["outer:   0%|          | 0/4", "caught midway"]),
        (leaves_no_line, []),
    ],
)
def test_what_a_loop_leaves_is_its_own_lines_and_one_of_its_outermost_bar(loop, lines):
    run = launch(loop, **{**SETTINGS, "num_processes": 2})
    run.wait(60)
    for rank in range(2):
        kept = [line.split(" [")[0] for line in run.logs(rank).splitlines()]
        assert sorted(kept) == sorted(lines)
        assert run.view.line_count_of(rank) == len(lines)


def writes_to_a_file_of_its_own(path):
    with open(path, "w") as file:
        for _ in tqdm(range(2), desc="filed", file=file, mininterval=0):
            pass
    with redirect_stderr(StringIO()) as caught:
        for _ in tqdm(range(2), desc="caught", mininterval=0):
            pass
    return caught.getvalue()


def test_what_is_drawn_elsewhere_than_on_a_rank_s_streams_is_left_as_it_is(tmp_path):
    run = launch(writes_to_a_file_of_its_own, (str(tmp_path / "file"),), **SETTINGS)
    caught = run.wait(60)
    assert (tmp_path / "file").read_bytes().count(b"\rfiled:") >= 3
    assert caught.count("\rcaught:") >= 3
    assert run.logs(0) == ""


def in_another_process():
    def child():
        for _ in tqdm(range(3), desc="child", mininterval=0):
            pass

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_bars_of_a_rank_s_own_processes_are_text():
    run = launch(in_another_process, **SETTINGS)
    run.wait(60)
    assert run.view.rank(0).progress == {}
    assert "child" in run.logs(0)


@pytest.mark.slow
def test_the_bars_of_transformers_trainer_are_the_rank_s_and_one_is_left_among_what_it_logs(tmp_path):
    run = launch(listening, (trains, str(tmp_path)), **{**SETTINGS, "timeout": 100})
    progress = run.wait(100)
    assert (progress[0].done, progress[0].total) == (0, 4)
    assert (progress[-1].done, progress[-1].closed) == (4, True)
    lines = run.logs(0).splitlines()
    assert len([line for line in lines if "%|" in line]) == 1
    assert not any("\r" in line or "\x1b[A" in line for line in lines)
