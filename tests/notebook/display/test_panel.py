"""What a panel tells its pages, and what it leaves them."""

from __future__ import annotations

from types import SimpleNamespace

from accelerate_nb.events.model import StateChange
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.busy_kernel_comm import BusyKernelComm
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
    live.end({"text/plain": "the report"})
    assert [message["state"]["state"] for message in sent[held_back:] if "state" in message] == ["stopped"]
