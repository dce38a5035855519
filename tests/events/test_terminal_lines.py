"""Text of ranks acts on no terminal and no page; a line that draws a bar is told from one that only waits for its end."""

import io
import re

import pytest
from tqdm import tqdm

from accelerate_nb.events import event_types
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import cleaned, draws_a_bar, plain, plain_name
from accelerate_nb.reports.report import as_html

BAR = event_types.Progress(0, "progress", 1, 3, 0.0)


def line(text, rank=0, open=True):
    return event_types.LogLine(rank, "stderr", text, 0.0, open)


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"total": 10}, {"total": 10, "desc": "epoch 1"}, {"total": 10, "postfix": {"loss": 0.5}}),
        *({"total": 10, "ncols": 40, "ascii": True}, {"total": 10**7, "unit": "B", "unit_scale": True}),
        {"desc": "read", "unit": "file", "initial": 1000, "unit_scale": True},
    ],
)
@pytest.mark.parametrize("elapsed", [0, 3, 100_000])
def test_what_tqdm_draws_is_a_bar(given, elapsed):
    bar = tqdm(file=io.StringIO(), **given)
    bar.update(4)
    bar.start_t -= elapsed
    assert draws_a_bar(line(str(bar)), [BAR])
    bar.close()


@pytest.mark.parametrize("text", ["What next? ", "loading [ok]", "50% done", "step 3/10", "[rank 0] 3 [a, b]", ""])
def test_other_open_lines_are_none(text):
    assert not draws_a_bar(line(text), [BAR])


def test_a_bar_that_is_not_known_is_a_line():
    text = "40%|####  | 4/10 [00:01<00:02, 3.1it/s]"
    assert draws_a_bar(line(text), [BAR])
    assert not draws_a_bar(line(text), [])
    assert not draws_a_bar(line(text, rank=1), [BAR])
    assert not draws_a_bar(line(text, open=False), [BAR])


HARMFUL = [
    *("\x1b]0;title\x07", "\x1b]8;;http://a\x1b\\", "\x1b]52;c;aGk=\x9c"),
    *("\x1bPq#0\x1b\\", "\x1b_a\x1b\\", "\x9d0;title\x9c"),
    *("\x1b[2J", "\x1b[?1049h", "\x9b2J", "\x1b[6n", "\x1bc", "\x1b(0", "\x1b#8"),
    *("\x07", "\x08", "\r", "\x00", "\x7f", "\x85"),
    *("\u202e", "\u202a", "\u2066", "\u2069", "\u200f", "\u200e", "\u061c", "\ufffe"),
    # cut off, or made anew by what is taken out of the middle
    *("\x1b]0;title", "\x1b[31", "\x1b", "\x9b"),
    *("\x1b\x07]0;title\x07", "\x1b\x1b]0;a\x07]0;b\x07", "\x1b[\x003\x071m", "\x1b]0;a\nb\x07"),
]
ACTS = re.compile(
    r"\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe]"
)


@pytest.mark.parametrize("harmful", HARMFUL, ids=ascii)
def test_no_text_acts_on_a_terminal(harmful):
    text = f"a \x1b[31mred{harmful} \U0001f468\u200d\U0001f469\u200d\U0001f467 שלום\x1b[0m\tz"
    for width in (None, *range(len(text))):
        assert not ACTS.search(cleaned(text, width))
    assert cleaned(text, None).startswith("a \x1b[31mred")
    assert not ACTS.search(plain(text))
    assert "\x1b" not in plain(text)
    assert plain(text).endswith("\U0001f468\u200d\U0001f469\u200d\U0001f467 שלום\tz")
    assert plain_name(f"lo{harmful}ss\n\n2\t") == " ".join(plain(f"lo{harmful}ss 2").split())
    assert "\x1b" not in (page := as_html(text))
    assert not ACTS.search(page)


def test_a_run_names_everything_harmlessly():
    view, name = RunState(1), "a\x1b]0;title\x07\u202eb\n\x9bc"
    frame = event_types.Frame("cell 1", name, "x = 1", True)
    for event in (
        event_types.Metric(0, name, 1.0, 1, 1.0),
        event_types.Progress(0, name, 1, 2, 1.0, unit=name, bar=name, note=name),
        event_types.DeviceSample(0, name, 1.0, 1, 2, 1.0),
        event_types.NodeRanks(0, name, 0, 0),
        event_types.MeshCoordinates(0, {name: 1}, 1.0),
        event_types.KnobValue(0, name, 1.0, 1, None, None, 1.0),
        event_types.StepProfile(0, 0, 1, 1.0, (event_types.ProfiledOperation(name, 1, 1.0, 1.0, name),), name, 1.0),
        event_types.Failure(0, name, name, name, 1.0, last_lines=(name,), frames=(frame,), advice=name),
        event_types.StateChange(0, "failed", 1.0, name),
        event_types.IdleWarning(1.0, name, 1.0),
        event_types.Restart(1, 2, name, 0.0, 1.0),
        event_types.Hang(1.0, name, name, 1.0),
    ):
        view.apply(event)
    rank = view.rank(0)
    for shown in (rank, view.nodes, view.idle_warning, view.hang):
        assert not re.search(r"\\x1b|\\x9b|\\x07|\\u202e", ascii(shown)), shown
    assert [*rank.knobs] == [*rank.coordinates] == [*rank.devices] == [*rank.metrics]
