"""What a panel tells its pages, what these request of it, and what it leaves them."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.events.event_types import KnobValue, ProfiledOperation, ProfileRequested, StateChange, StepProfile
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display import panel
from accelerate_nb.notebook.display.busy_kernel_comm import BusyKernelComm
from accelerate_nb.notebook.display.message_feed import MessageFeed
from accelerate_nb.notebook.display.output_area import MimeBundle
from accelerate_nb.notebook.display.panel import LivePanel, end_of, reply
from accelerate_nb.notebook.display.run_display import FrontendState


def run_of(view, folder):
    return SimpleNamespace(name="train", why="", folder=folder, view=view, started=0.0, done=False)


def test_a_page_that_does_not_answer_is_sent_no_more_until_it_does_but_the_end(monkeypatch, tmp_path):
    now, sent = [0.0], []
    view = RunState(1)
    live = LivePanel(run_of(view, tmp_path), "jupyter", BusyKernelComm(), background=True, clock=lambda: now[0])
    monkeypatch.setattr(live._panel, "send", lambda message, buffers=None: sent.append(message))
    live._inbox.append({"do": "hello"})
    live.step()
    for detail in ("first", "second"):
        # as long as nothing comes from it
        now[0] += 100.0
        view.apply(StateChange(None, "running", 1.0, detail))
        held_back = len(sent)
        live.step()
        assert len(sent) == held_back
        live._inbox.append({"do": "ack", "seq": sent[-1]["seq"]})
        live.step()
        assert [message["seq"] for message in sent] == list(range(1, held_back + 2))
    now[0] += 100.0
    view.apply(StateChange(None, "stopped", 2.0))
    live.end(MimeBundle({"text/plain": "the report"}))
    assert [message["state"]["state"] for message in sent[held_back + 1 :] if "state" in message] == ["stopped"]


@pytest.mark.parametrize("is_sent", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_interrupt_while_a_message_is_sent_leaves_the_page_up_to_date(monkeypatch, tmp_path, number, is_sent):
    sent: list[dict[str, Any]] = []
    view = RunState(1)
    live = LivePanel(run_of(view, tmp_path), "jupyter", BusyKernelComm(), background=True)
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
    run, frontend = run_of(RunState(1), tmp_path), FrontendState()
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
    # one that is used again and again stays
    for live in panels[1:]:
        frontend.keep(panels[0])
        frontend.keep(live)
    assert panels[0]._panel.comm is not None


def test_a_log_is_fetched_whole_or_its_end_with_a_word_about_the_rest(tmp_path):
    file = tmp_path / "rank_0.log"
    file.write_bytes(b"abcdef")
    request = {"do": "log", "rank": 0}
    assert reply(SimpleNamespace(log_file=lambda _: file), request) == ({"file": {"name": file.name}}, [b"abcdef"])
    # nothing else is read
    for wrong in ({"do": "log", "rank": "../../secret"}, {"do": "trace"}, {"do": "nonsense"}):
        assert reply(SimpleNamespace(log_file=lambda _: file), wrong) is None
    assert end_of(file, 2) == f"... the first 4 bytes are left out here; all of it is in {file} ...\nef".encode()
    assert end_of(tmp_path / "none", 10) == b""


def test_a_knob_is_set_and_a_refusal_is_the_reply():
    given = []
    run = SimpleNamespace(set_knob=lambda name, value: given.append((name, value)))
    assert reply(run, {"do": "knob", "name": "lr", "value": 0.5}) is None
    assert given == [("lr", 0.5)]
    run = SimpleNamespace(set_knob=Mock(side_effect=ConfigurationError("takes finite numbers")))
    refusal = {"knob_error": {"name": "lr", "text": "takes finite numbers"}}
    assert reply(run, {"do": "knob", "name": "lr", "value": "x"}) == (refusal, [])


def test_pages_get_the_knobs_with_a_change_that_both_ranks_report_as_one():
    view = RunState(1)
    for rank in range(2):
        view.apply(KnobValue(rank, "lr", 0.1, 0, None, 1.0, 2.0))
        view.apply(KnobValue(rank, "lr", 0.2, 7, None, 1.0, 3.0 + rank, changed=True))
    message = MessageFeed(view).news()
    assert message["knobs"] == [["lr", 0.2, None, 1.0]]
    assert message["knob_changes"] == [["lr", 0.2, 3.0]]


def test_a_profile_is_requested_and_its_trace_is_the_reply(tmp_path, monkeypatch):
    view, given = RunState(2), []
    run = SimpleNamespace(folder=tmp_path, view=view, profile=lambda ranks: given.append(ranks))
    assert reply(run, {"do": "profile", "ranks": [1]}) is None
    assert given == [[1]]
    assert reply(run, {"do": "trace", "rank": 1}) is None
    view.apply(StepProfile(1, 1, 10, 0.5, (), "/elsewhere/trace.json.gz", 3.0))
    message, files = reply(run, {"do": "trace", "rank": 1})
    assert "/elsewhere/trace.json.gz" in message["profile_error"]
    (tmp_path / "trace.json.gz").write_bytes(b"abc")
    assert reply(run, {"do": "trace", "rank": 1}) == ({"file": {"name": "trace.json.gz"}}, [b"abc"])
    monkeypatch.setattr(panel, "_MOST_OF_A_FILE", 2)
    message, files = reply(run, {"do": "trace", "rank": 1})
    assert (files, "too large" in message["profile_error"]) == ([], True)
    run.profile = Mock(side_effect=StateError("one is under way"))
    assert reply(run, {"do": "profile", "ranks": None}) == ({"profile_error": "one is under way"}, [])


def test_pages_get_a_profile_that_is_under_way_and_its_table():
    view = RunState(2)
    feed = MessageFeed(view)
    view.apply(ProfileRequested(1, 1, 10, 2.0))
    assert feed.news()["profiles"] == [[1, 10, None]]
    view.apply(StateChange(0, "running", 2.0))
    assert "profiles" not in feed.news()
    profile = StepProfile(1, 1, 9, 0.5, (ProfiledOperation("aten::mm", 18, 0.25, 0.5, "cpu"),), "/trace", 3.0)
    view.apply(profile)
    ((rank, profiling, sent),) = feed.news()["profiles"]
    assert (rank, profiling, sent["steps"], sent["operations"]) == (1, None, 9, profile.operations)
    # a rank that starts again has forgotten the request
    view.apply(ProfileRequested(1, 2, 10, 2.0))
    feed.news()
    view.apply(StateChange(1, "starting", 4.0))
    assert feed.news()["profiles"][0][1] is None
