"""What a panel tells its pages, and what it leaves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_nb.events.model import StateChange
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.busy_kernel_comm import BusyKernelComm
from accelerate_nb.notebook.display.output_area import MimeBundle
from accelerate_nb.notebook.display.panel import LivePanel
from accelerate_nb.notebook.display.run_display import FrontendState


def test_a_page_that_has_not_answered_is_sent_the_end_all_the_same(monkeypatch, tmp_path):
    now, sent = [0.0], []
    view = RunState(1)
    run = SimpleNamespace(name="train", why="", folder=tmp_path, view=view, started=0.0, done=False)
    live = LivePanel(run, "jupyter", BusyKernelComm(), background=True, clock=lambda: now[0])
    monkeypatch.setattr(live._panel, "send", lambda message, buffers=None: sent.append(message))
    live._inbox.append({"do": "hello"})
    live.step()
    view.apply(StateChange(None, "running", 1.0))
    now[0] += 100.0
    live.step()
    held_back = len(sent)
    live.step()
    assert len(sent) == held_back
    view.apply(StateChange(None, "stopped", 2.0))
    live.end(MimeBundle({"text/plain": "the report"}))
    assert [message["state"]["state"] for message in sent[held_back:] if "state" in message] == ["stopped"]


@pytest.mark.parametrize("is_sent", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_interrupt_while_a_message_is_sent_leaves_the_page_up_to_date(monkeypatch, tmp_path, number, is_sent):
    sent: list[dict[str, Any]] = []
    view = RunState(1)
    run = SimpleNamespace(name="train", why="", folder=tmp_path, view=view, started=0.0, done=False)
    live = LivePanel(run, "jupyter", BusyKernelComm(), background=True)
    calls = iter(range(100))

    def send(message: dict[str, Any], buffers: object = None) -> None:
        is_interrupted = next(calls) == number
        if is_sent or not is_interrupted:
            sent.append(message)
        if is_interrupted:
            raise KeyboardInterrupt

    def step(*states: str) -> None:
        for state in states:
            view.apply(StateChange(None, state, 1.0))
        try:
            live.step()
        except KeyboardInterrupt:
            live.step()

    monkeypatch.setattr(live._panel, "send", send)
    live._inbox.append({"do": "hello"})
    step()
    live._outbox.append(({"stacks": {"text": "train.py:3"}}, []))
    step("running")
    live._inbox.append({"do": "hello"})
    step("stopped")
    live.end(MimeBundle({"text/plain": "the report"}))
    begin = max(index for index, message in enumerate(sent) if message.get("reset"))
    assert [message["state"]["state"] for message in sent[begin:] if "state" in message][-1] == "stopped"
    assert any("stacks" in message for message in sent)
    assert live._was_loaded_anew


def test_the_ends_of_a_night_s_runs_wait_for_a_page(tmp_path):
    view = RunState(1)
    run = SimpleNamespace(name="train", why="", folder=tmp_path, view=view, started=0.0, done=False)
    frontend = FrontendState()
    panels = [LivePanel(run, "jupyter", BusyKernelComm(), background=True) for _ in range(20)]
    for live in panels:
        live.end(MimeBundle({"text/plain": "the report"}))
        frontend.keep(live)
    assert not any(live._panel.comm is None for live in panels)
    assert not any(live.is_delivered for live in panels)
    for live in panels:
        live._take({"do": "hello"})
        live._take({"do": "ack", "seq": live._feed.seq})
    assert all(live.is_delivered for live in panels)
