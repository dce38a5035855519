"""A run that stands still is told of: which ranks wait in which collective, which one is elsewhere, which has returned."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.elastic.utils.store import barrier

from accelerate_nb import Accelerator, HangError, launch
from accelerate_nb.failures.hang_report import StackSnapshot, diagnosis, is_at_work
from accelerate_nb.failures.stack_dumps import stacks_text
from accelerate_nb.launching.group_runner import IdleWatchdog
from accelerate_nb.sources.cells import CellSources
from tests.waiting import until

SETTINGS = {"num_processes": 2, "cpu": True, "config_file": "", "timeout": 60, "stop_grace_period": 0.2}
NOWHERE = CellSources({}, {})
C10D = "/site-packages/torch/distributed/distributed_c10d.py"


def stack(*frames):
    """What faulthandler writes of a main thread; outermost call first here."""
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in reversed(frames)]
    return "\n".join(["Current thread 0x01 (most recent call first):", *lines, ""])


def waits(line=8):
    return stack(("/me/a.py", 3, "train"), ("/me/a.py", line, "step"), (C10D, 70, "wrapper"), (C10D, 9, "all_reduce"))


SLEEPS = stack(("/me/a.py", 3, "train"), ("/me/a.py", 7, "load"))


def lines_of(replies, collectives=None, returned=()):
    return diagnosis(StackSnapshot(replies, collectives or {}, returned), NOWHERE).split("\n")


def pending(name, number=2, size=(3,)):
    return [{"group": "0", "number": number, "name": f"gloo:{name}", "sizes": [list(size)]}]


def test_ranks_that_wait_come_first_and_the_one_that_is_elsewhere_is_named():
    assert lines_of({0: SLEEPS, 1: waits(), 2: waits()}) == [
        'ranks 1, 2 wait in all_reduce, at File "/me/a.py", line 8',
        'rank 0 is elsewhere, at File "/me/a.py", line 7',
        "All ranks have to come to the same collective; rank 0 has not.",
    ]


def test_a_rank_that_has_returned_is_what_the_others_wait_for():
    assert lines_of({0: waits()}, returned=[1]) == [
        'rank 0 waits in all_reduce, at File "/me/a.py", line 8',
        "rank 1 has returned already",
        "All ranks have to come to the same collective; rank 1 has not.",
    ]


def test_different_calls_are_distinguished_from_the_same_one():
    assert lines_of({0: waits(), 1: waits(9)})[-1].startswith("All ranks wait, but not in the same call")
    assert lines_of({0: waits(), 1: waits()})[-1].startswith("All ranks wait in the same call")


def test_calls_that_don_t_fit_are_reported_from_torchs_records():
    recorded = {0: pending("all_reduce"), 1: pending("broadcast", size=())}
    assert lines_of({0: waits(), 1: waits(9)}, recorded)[-1] == (
        "Collective number 2 is all_reduce of 3 on rank 0, but broadcast of one number on rank 1: all ranks have to make the "
        "same calls in the same order."
    )


def test_a_rank_whose_process_is_stopped_is_named_so_and_no_conclusion_is_of_all():
    state = "its process 7 is stopped, by SIGSTOP or Ctrl+Z; `kill -CONT 7` lets it go on"
    lines = lines_of({0: waits(), 1: state, 2: waits()})
    assert lines == [
        'ranks 0, 2 wait in all_reduce, at File "/me/a.py", line 8',
        f"rank 1 does not answer: {state}",
        "The others wait. It is not known where rank 1 is.",
    ]
    assert is_at_work(StackSnapshot({0: state}, {}))
    assert f"({state})" in stacks_text({0: state}, NOWHERE)


def test_where_no_rank_waits_nothing_is_concluded():
    assert lines_of({0: SLEEPS, 1: SLEEPS, 2: ""}) == [
        'ranks 0, 1 are at File "/me/a.py", line 7',
        "rank 2 is still starting, or can't answer",
    ]
    assert lines_of({}) == [""]


def test_an_idle_time_is_reported_when_it_is_long_and_each_time_that_it_has_doubled(monkeypatch):
    clock, taken = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def warned(watchdog, times):
        for clock[0] in times:
            if clock[0] >= watchdog.due:
                yield clock[0]
            watchdog.check()

    def watchdog_after(seconds):
        context = SimpleNamespace(hang_warning_after=seconds, take=taken.append)
        return IdleWatchdog(context, lambda: StackSnapshot({}, {}), None)

    watchdog = watchdog_after(10.0)
    assert list(warned(watchdog, range(100, 200))) == [110, 120, 140, 180]
    for clock[0] in (200, 201):
        watchdog.restart()
    # the warning that had been shown goes, once
    assert [event.seconds for event in taken] == [0]
    assert list(warned(watchdog, range(201, 230))) == [211, 221]
    assert not list(warned(watchdog_after(0.0), [1e9]))


# -------------------------------------------------------------------------------------------------------- of real ranks


def skips_one(folder):
    accelerator = Accelerator()
    if accelerator.process_index == 1:
        until(Path(folder, "go").exists)
    accelerator.gather(torch.ones(2))
    return "done"


# torch's flight recorder of 2.13 tells of gloo, that of 2.9 keeps nothing of it. The stacks show less.
RECORDS_GLOO = Version(torch.__version__) >= Version("2.13")
RECORDED = "is all_reduce of 3 on rank 0, but broadcast of 3 on rank 1"
SEEN = "All ranks wait, but not in the same call"


def calls_another(_):
    accelerator = Accelerator()
    tensor = torch.ones(3)
    if accelerator.process_index == 1:
        dist.broadcast(tensor, 0)
    else:
        dist.all_reduce(tensor)
    dist.barrier()


CALLS = {
    "wait_for_everyone": lambda accelerator, _: accelerator.wait_for_everyone(),
    "gather": lambda accelerator, _: accelerator.gather(torch.ones(2)),
    "all_reduce": lambda *_: dist.all_reduce(torch.ones(2), async_op=True).wait(),
    "recv": lambda *_: dist.recv(torch.ones(2), src=2),
    "barrier": lambda *_: barrier(dist.distributed_c10d._get_default_store(), 3, "all", 60),
    "store.wait": lambda *_: dist.distributed_c10d._get_default_store().wait(["of rank 2"]),
    "backward's all_reduce": lambda _, model: model(torch.ones(2, 3)).sum().backward(),
}


def leaves_early(_, name):
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    if accelerator.process_index != 2:
        CALLS[name](accelerator, model)


def comes_late(folder):
    """Rank 2 has returned, and none of the others needs it."""
    accelerator = Accelerator()
    group = dist.new_group([0, 1])
    if accelerator.process_index == 1:
        until(Path(folder, "go").exists)
    if accelerator.process_index != 2:
        dist.all_reduce(torch.ones(3), group=group)
    return "done"


def computes_on(_):
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    for step in range(5):
        while step == 3 and accelerator.process_index == 1:
            pass
        accelerator.backward(model(torch.ones(2, 3)).sum())


def until_idle(run, text):
    until(lambda: run.view.idle_warning is not None and text in run.view.idle_warning.text, run)
    return run.view.idle_warning


def test_an_idle_run_reports_who_waits_and_goes_on_when_it_can(tmp_path):
    run = launch(skips_one, (str(tmp_path),), hang_warning_after=0.5, **SETTINGS)
    idle_warning = until_idle(run, "waits in gather")
    assert idle_warning.seconds >= 0.5
    lines = idle_warning.text.split("\n")
    assert lines[0].startswith("Nothing has come from any rank for ")
    assert lines[1].startswith(f'rank 0 waits in gather, at File "{__file__}", line ')
    assert lines[1].endswith(": accelerator.gather(torch.ones(2))")
    assert lines[2].startswith("rank 1 is elsewhere")
    (tmp_path / "go").touch()
    assert run.wait(60) == "done"
    assert run.view.idle_warning is None
    assert b'"type":"idle_warning","seconds":0' in (run.folder / "events.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("function", "text"),
    [(calls_another, RECORDED if RECORDS_GLOO else SEEN), (computes_on, "rank 0 waits in backward's all_reduce")],
)
def test_what_ranks_wait_for_is_reported_with_their_stacks(tmp_path, function, text):
    run = launch(function, (str(tmp_path),), hang_warning_after=0.5, **SETTINGS)
    until_idle(run, text)
    stacks = run.stacks()
    assert text in stacks[: stacks.index("\nrank 0:")]
    run.stop(timeout=0)
    assert run.done


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "gather" else pytest.mark.slow)
        for name in CALLS
        if RECORDS_GLOO or name not in {"all_reduce", "backward's all_reduce"}
    ],
)
def test_ranks_that_wait_for_one_that_has_returned_are_ended_at_the_warning(name):
    settings = {**SETTINGS, "num_processes": 3, "timeout": None, "hang_warning_after": 0.5}
    run = launch(leaves_early, ("", name), **settings)
    with pytest.raises(HangError, match="ranks waited for others that had returned") as caught:
        run.wait(60)
    assert f"ranks 0, 1 wait in {name}, at " in str(caught.value)
    conclusion = "rank 2 has returned already\nAll ranks have to come to the same collective; rank 2 has not."
    assert conclusion in str(caught.value)
    assert caught.value.hang is not None
    assert run.view.detail == "ranks waited for others that had returned, and the run was stopped"


def test_ranks_that_need_no_returned_one_go_on(tmp_path):
    run = launch(comes_late, (str(tmp_path),), hang_warning_after=0.5, **{**SETTINGS, "num_processes": 3})
    until_idle(run, "rank 1 is elsewhere")
    (tmp_path / "go").touch()
    assert run.wait(60) == "done"
