"""A worker answers while its function runs, and no question harms it."""

import os
import threading
from pathlib import Path

from accelerate_nb import launch
from accelerate_nb.failures.stack_dumps import SIGNAL
from accelerate_nb.transport.channel import message_of
from accelerate_nb.transport.messages import CollectivesReply, QueryCollectives
from tests.waiting import until

SETTINGS = {"num_processes": 1, "cpu": True, "config_file": "", "timeout": 60, "panel": "off"}


def waits_for(path):
    while not Path(path).exists():
        threading.Event().wait(0.01)
    return "well"


def until_it_runs(run):
    until(lambda: run.view.rank(0).state == "running", run)
    return int(run.view.rank(0).detail)


def test_a_question_whose_asker_has_gone_harms_nobody(tmp_path):
    end = tmp_path / "end"
    run = launch(waits_for, (str(end),), **SETTINGS)
    until_it_runs(run)
    gone, its = os.pipe()
    os.close(gone)
    run._control.send(0, QueryCollectives(), [its])
    os.close(its)
    mine, its = os.pipe()
    run._control.send(0, QueryCollectives(), [its])
    os.close(its)
    with open(mine, "rb") as reply_file:
        assert message_of(reply_file.read()) == CollectivesReply(())
    end.touch()
    assert run.wait(60) == "well"


def computes_in_threads(path):
    def deep(depth):
        return depth if depth == 0 else deep(depth - 1)

    def always():
        while True:
            deep(30)
            sorted(range(20), key=lambda item: -item)

    for _ in range(4):
        threading.Thread(target=always, daemon=True).start()
    return waits_for(path)


def test_stacks_of_a_rank_are_requested_as_often_as_one_likes_while_its_threads_run(tmp_path):
    end = tmp_path / "end"
    run = launch(computes_in_threads, (str(end),), **SETTINGS)
    pid = until_it_runs(run)
    pause = threading.Event()
    for _ in range(1500):
        try:
            os.kill(pid, SIGNAL)
        except ProcessLookupError:
            run.wait(60)  # says how it ended
            raise
        pause.wait(0.002)
    assert "in waits_for" in run.stacks()
    end.touch()
    assert run.wait(60) == "well"
