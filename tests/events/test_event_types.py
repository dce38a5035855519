"""Every event survives the way through its line of JSON, and of many failures the one that led to the others is found."""

import itertools
import json
import math
import signal
from pathlib import Path
from typing import get_args

import pytest

from accelerate_nb.events import event_types as events
from accelerate_nb.events.event_codec import from_line, to_line

FRAMES = (events.Frame("Cell In[3], line 7", "train", "x = 1 / 0", True),)
OPERATIONS = (events.ProfiledOperation("aten::mm", 18, 0.25, 0.5, "cpu"),)
NUMBERS = {"a": [10**40, math.nan, -math.inf]}
EVENTS = [
    events.LogLine(0, "stdout", 'tab\t quote " newline \n grüße 😀 \udcff', 1.5, open=True),
    events.Metric(3, "loss/train", -1e-300, 12, 2.0),
    events.Metric(3, "loss", math.inf, None, 2.0),
    events.Progress(1, "epoch", 3.0, None, 0.0),
    events.HostSample(12.5, (1, 2), None, (3, 4), 0.0),
    events.HostSample(12.5, (1, 2), None, None, 0.0, node=3),
    events.IdleWarning(61.0, "rank 1 is elsewhere", 0.0),
    events.Display(0, {"text/plain": "x", "application/json": {"a": [1, {"b": None}]}}, {"isolated": True}, 0.0),
    events.DeviceSample(0, "cuda:0", 12.5, 2**40, None, 0.0),
    events.StateChange(None, "failed", 7.25, "why"),
    events.StateChange(0, "running", 0.0),
    events.Failure(2, "KeyError", "'x'", "a\nb", 1.0, -11, ("last", "words"), lost_connection=True, ended_by_us=True),
    events.Failure(0, "E", "m", "t", 1.0, frames=FRAMES, advice="Do."),
    events.Hang(30.0, "rank 1 waits in gather", "stacks", 2.0),
    events.TaskDone(1, 7),
    events.FirstStep(1, 2.5),
    events.NodeRanks(1, "gpu-b", 4, 7),
    events.Restart(2, 3, "rank 1 ended with SIGKILL", 0.4, 3.0),
    events.MeshCoordinates(1, {"dp_shard": 0, "tp": 1}, 11.0),
    events.PrecisionChoice(0, "bf16", 11.0),
    events.StepBreakdown(1, 7, 0.1, 0.2, 0.3, 0.0, 0.4, 0.0, 11.0, workers=2, compiled=True),
    events.MemoryUse(1, 2**40, 3, 4, None, 11.0),
    events.KnobValue(1, "lr", 1e-3, 7, None, 0.1, 11.0, changed=True),
    events.ProfileRequested(1, 2, 10, 11.0),
    events.StepProfile(1, 2, 9, 0.5, OPERATIONS, "/runs/1/profile.json.gz", 11.0),
    # what JSON has no numbers or no text for
    events.Metric(0, "loss", math.nan, 2**70, 2.0),
    events.Metric(0, "loss", -math.inf, 3, 2.0),
    events.Metric(0, "steps", 7.0, 3, 2.0),
    events.Progress(0, "epoch", math.inf, math.nan, 1.0, math.nan, "it", True, "a", "\udc80"),
    events.Display(0, {"text/plain": "\ud800", "application/json": NUMBERS}, {}, 0.0, "id", update=True),
    events.Failure(1, "OSError", "no such file: '\udcff\udcfe'", "\x1b[31mred\x1b[0m \u2028", 1.0, None, ("\udcff",)),
    events.HeldAt(1, 2, None),
    events.HeldAt(1, 0, 7, 0.25, True, True, 3),
]


@pytest.mark.parametrize("event", EVENTS, ids=type)
def test_an_event_survives_its_line(event):
    line = to_line(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    # as texts: a number that is none is not equal to itself
    assert repr(from_line(line)) == repr(from_line(line.decode())) == repr(event)


def test_a_node_s_label_has_its_number_once():
    labels = {"gpu-b": "node 1 · gpu-b", "node1": "node 1 · node1"}
    labels |= {name: name for name in ("node 1", "node 1 on gpu-b")}
    assert {name: events.NodeRanks(1, name, 4, 7).label for name in labels} == labels


def test_every_kind_is_tried():
    assert {type(event) for event in EVENTS} == set(get_args(events.Event))


def test_a_type_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="teapot"):
        from_line(b'{"type": "teapot"}')
    with pytest.raises(ValueError, match="type"):
        from_line(b"{}")


def test_a_file_of_before_msgspec_wrote_it_is_read():
    lines = Path(__file__).with_name("former_events.jsonl").read_bytes().splitlines()
    assert len(lines) == 31
    assert [repr(from_line(line)) for line in lines] == list(map(repr, EVENTS[:31]))


@pytest.mark.parametrize(
    ("fields", "event"),
    [
        (
            '"LogLine", "rank": 0, "stream": "stdout", "text": "a", "time": 1.0, "open": false',
            events.LogLine(0, "stdout", "a", 1.0),
        ),
        (
            '"Failure", "rank": 1, "type": "KeyError", "message": "m", "traceback": "t", "time": 1.0',
            events.Failure(1, "KeyError", "m", "t", 1.0),
        ),
        ('"Answered", "rank": 1, "number": 7', events.TaskDone(1, 7)),
    ],
)
def test_a_folder_of_before_the_type_tags_is_read(fields, event):
    assert from_line(f'{{"event": {fields}}}'.encode()) == event


def test_a_line_keeps_its_type_and_the_exceptions_apart():
    failure = json.loads(to_line(events.Failure(1, "KeyError", "m", "t", 1.0)))
    assert failure["type"] == "failure"
    assert failure["exception"] == "KeyError"


def test_fields_of_a_later_version_are_passed_over():
    fields = json.loads(to_line(EVENTS[1])) | {"colour": "red"}
    assert from_line(json.dumps(fields)) == EVENTS[1]


def failure(rank, time, **more):
    return events.Failure(rank, "E", "", "", time, **more)


def aborted(last_line):
    return failure(0, 1.0, exit_code=-signal.SIGABRT, last_lines=(last_line,))


@pytest.mark.parametrize(
    ("failures", "leads"),
    [
        ([failure(0, 1.0)], 0),
        ([failure(0, 2.0), failure(1, 1.0)], 1),
        ([failure(0, 1.0, lost_connection=True), failure(1, 2.0)], 1),
        ([failure(0, 1.0, ended_by_us=True), failure(1, 2.0, lost_connection=True)], 1),
        ([failure(0, 1.0, lost_connection=True), failure(1, 2.0), failure(2, 1.5, ended_by_us=True)], 1),
        ([failure(0, 2.0, lost_connection=True), failure(1, 1.0, lost_connection=True)], 1),
        ([aborted("what(): Connection closed by peer"), failure(1, 2.0, exit_code=-signal.SIGKILL)], 1),
        ([aborted("assertion failed"), failure(1, 2.0)], 0),
    ],
)
def test_the_cause_leads_in_whatever_order_failures_come(failures, leads):
    for order in itertools.permutations(failures):
        assert events.cause(order).rank == leads
