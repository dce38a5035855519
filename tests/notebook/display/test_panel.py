"""What a panel tells its pages, and what it leaves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.events.knob_events import KnobValue
from accelerate_nb.events.model import StateChange
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.busy_kernel_comm import BusyKernelComm
from accelerate_nb.notebook.display.output_area import MimeBundle
from accelerate_nb.notebook.display.panel import LivePanel, end_of


def test_a_log_is_fetched_whole_or_its_end_with_a_word_about_the_rest(tmp_path):
    file = tmp_path / "rank_0.log"
    file.write_bytes(b"abcdef")
    assert end_of(file, 10) == b"abcdef"
    assert end_of(file, 2) == f"... the first 4 bytes are left out here; all of it is in {file} ...\nef".encode()
    assert end_of(tmp_path / "none", 10) == b""


def test_a_page_that_has_not_answered_is_told_the_end_all_the_same(monkeypatch, tmp_path):
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


def test_a_knob_is_set_and_a_refusal_is_sent_to_the_page(monkeypatch, tmp_path):
    sent, given = [], []

    def set_knob(name: str, value: Any) -> None:
        if not isinstance(value, float):
            raise ConfigurationError("takes finite numbers")
        given.append((name, value))

    view = applied_knobs(RunState(1))
    run = SimpleNamespace(name="train", why="", folder=tmp_path, view=view, started=0.0, done=False, set_knob=set_knob)
    live = LivePanel(run, "jupyter", BusyKernelComm(), background=True)
    monkeypatch.setattr(live._panel, "send", lambda message, buffers=None: sent.append(message))
    monkeypatch.setattr(live, "_beside", lambda work: work())
    live._inbox.extend(
        [{"do": "hello"}, {"do": "knob", "name": "lr", "value": 0.5}, {"do": "knob", "name": "lr", "value": "x"}]
    )
    live.step()
    assert given == [("lr", 0.5)]
    assert sent[0]["knobs"] == [["lr", 0.2, None, 1.0]]
    # a change that both ranks report is one
    assert sent[0]["knob_changes"] == [["lr", 0.2, 3.0]]
    assert {"name": "lr", "text": "takes finite numbers"} in [message.get("knob_error") for message in sent]


def applied_knobs(view: RunState) -> RunState:
    for rank in range(2):
        view.apply(KnobValue(rank, "lr", 0.1, 0, None, 1.0, 2.0))
        view.apply(KnobValue(rank, "lr", 0.2, 7, None, 1.0, 3.0 + rank, changed=True))
    return view
