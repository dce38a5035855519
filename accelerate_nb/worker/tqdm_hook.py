"""The hook that brings a worker's progress bars to the notebook: every tqdm bar sends `Progress` instead of drawing itself."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from weakref import ReferenceType, ref

from accelerate_nb.events.event_types import Progress
from accelerate_nb.rank import event_sink
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.rank.import_hook import after_import

# A bar that is drawn more often (`mininterval=0`) is sent less often; tqdm's own pace is a tenth of a second.
_BETWEEN = 0.09
_STATE = "_accelerate_nb_bar"
_NUMBERS = "_accelerate_nb_numbers"
_NAMELESS = "progress"
# A number beside a bar, where its code wrote the text itself: `loss=0.303`, `acc: 93.1%`.
_SHOWN_NUMBER = re.compile(
    r"([A-Za-z_][\w/.@-]*)\s*[=:]\s*([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf))(?![\w.:/-])", re.IGNORECASE
)


def install() -> None:
    """Send the progress of every bar of this process, whatever kind of tqdm it is; nothing is imported here."""
    # A nested bar moves the cursor: drawn here it would be lines of the rank's log. The outermost leaves one line there
    # when it ends, if it is one that is left. Widgets can't work from here: a `tqdm.notebook` bar is a bar of text.
    after_import("tqdm.std", functools.partial(_report_bars, process=os.getpid()))
    after_import("tqdm.notebook", _as_text)


def _report_bars(module: Any, process: int) -> None:
    """Make tqdm's class of bars, which all other kinds inherit from, send the progress of its bars in this process."""
    # those of a data loader's processes send nothing: the socket is their parent's
    tqdm, bars = module.tqdm, _OpenBars()
    print_status, postfix = tqdm.status_printer, tqdm.set_postfix

    def reporting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def reported(bar: Any, *args: Any, **kwargs: Any) -> Any:
            done = method(bar, *args, **kwargs)
            if os.getpid() == process:
                bars.update(bar)
            return done

        return reported

    @functools.wraps(print_status)
    def status_printer(file: Any) -> Any:
        """A bar calls it once, before it is drawn first; `file` is the bar's own wrapper of where it is drawn."""
        if os.getpid() == process and file in (sys.__stdout__, sys.__stderr__):
            file.wrapper_setattr("write", _nothing)
        return print_status(file)

    @functools.wraps(postfix)
    def set_postfix(bar: Any, ordered_dict: Any = None, refresh: bool = True, **kwargs: Any) -> Any:
        # as they are: the text beside the bar has three digits of them
        setattr(bar, _NUMBERS, {**dict(ordered_dict or ()), **kwargs})
        return postfix(bar, ordered_dict, refresh, **kwargs)

    tqdm.status_printer = staticmethod(status_printer)
    # at these three moments a bar of any kind has something new to show
    for name in ("__init__", "refresh", "close"):
        setattr(tqdm, name, reporting(getattr(tqdm, name)))
    if event_sink.is_on():
        tqdm.set_postfix = set_postfix


def _nothing(text: str) -> int:
    return len(text)


@dataclass(eq=False)
class _OpenBars:
    """The bars of this rank that are open, each under the first number that was free when it was first drawn."""

    # The number distinguishes nested bars, and stays where a loop makes its inner bar anew, which goes on counting
    # where the former one ended. Bars with other labels that show numbers of the same name have their label before it:
    # `loss` beside "train 3", `val/loss` beside "val 3".

    _taken: set[int] = field(default_factory=set)
    _last: dict[int, float] = field(default_factory=dict)
    _waiting: dict[int, tuple[ReferenceType[Any], _BarState]] = field(default_factory=dict)
    # by a bar's number, what those before it have counted, and the count whose numbers were reported last
    _counts: dict[int, float] = field(default_factory=dict)
    _reported: dict[int, float] = field(default_factory=dict)
    _labels: dict[str, str] = field(default_factory=dict)

    def update(self, bar: Any) -> None:
        """Send a bar's progress, or do so a moment later, where it has something new to show."""
        closed = bool(getattr(bar, "disable", True))
        state: _BarState | None = getattr(bar, _STATE, None)
        if state is None:
            if closed:
                return
            if bar.delay > 0 and not (hasattr(bar, "start_t") and bar._time() >= bar.start_t + bar.delay):
                # it is made to wait before it is drawn, and has not yet
                return
            state = _BarState(next(number for number in range(len(self._taken) + 1) if number not in self._taken))
            self._taken.add(state.number)
            setattr(bar, _STATE, state)
        if state.left:
            return
        if closed:
            state.left = True
            self._taken.discard(state.number)
            stays = bar.pos == 0 if bar.leave is None else bar.leave
            if state.number == 0 and stays and vars(bar.fp).get("write") is _nothing:
                # it would stay on the screen, and was not drawn there: past the wrapper, in one go: others write between two
                bar.fp._wrapped.write(f"{bar}\n")
        if self._due_in(state.number) <= 0 or (state.sent and (closed or bar.n == bar.total)):
            self._send(bar, state, closed=closed)
        elif not closed:
            # it was drawn too early, and may not move again
            is_waited_for = state.number in self._waiting
            self._waiting[state.number] = ref(bar), state
            if not is_waited_for:
                timer = threading.Timer(max(0.0, self._due_in(state.number)), self._send_late, (state.number,))
                timer.daemon = True
                timer.start()

    def _due_in(self, number: int) -> float:
        """Seconds until it is time for more of this number: a loop may make a thousand short bars in it each second."""
        return self._last.get(number, -_BETWEEN) + _BETWEEN - time.monotonic()

    def _send_late(self, number: int) -> None:
        """In a thread of its own: send the newest bar of a number, where it is still there and has moved."""
        known, state = self._waiting.pop(number)
        bar = known()
        if bar is None or state.left:
            return
        progress = _progress(bar, state.number, closed=False)
        if state.sent is not None and _shown(progress) == _shown(state.sent):
            return
        self._send(bar, state, closed=False)
        if state.left:
            # it closed meanwhile, and that is to be sent last
            emit(_progress(bar, state.number, closed=True))

    def _send(self, bar: Any, state: _BarState, *, closed: bool) -> None:
        """Send a bar's progress, and the numbers that it shows; those of its end once more only where they have changed."""
        state.sent = _progress(bar, state.number, closed=closed)
        self._last[state.number] = time.monotonic()
        emit(state.sent)
        if not event_sink.is_on():
            return
        count = self._counts.get(state.number, 0) + getattr(bar, "n", 0)
        if closed:
            self._counts[state.number] = count
        # those that its code gave, and those that stand in a text which it wrote
        text = str(getattr(bar, "postfix", None) or "")
        numbers = {name: float(value) for name, value in _SHOWN_NUMBER.findall(text)}
        numbers.update(event_sink.numbers_of(getattr(bar, _NUMBERS, {})))
        # a bar counts some units at once: what it shows meanwhile has no place of its own
        if numbers and numbers != state.numbers and count > self._reported.get(state.number, -1):
            state.numbers = numbers
            self._reported[state.number] = count
            label = re.sub(r"[^A-Za-z]+", " ", str(getattr(bar, "desc", None) or "")).strip()
            is_first = {name: label in {"", self._labels.setdefault(name, label)} for name in numbers}
            shown = {name if is_first[name] else f"{label}/{name}": value for name, value in numbers.items()}
            event_sink.report_shown(shown, int(count))


@dataclass(slots=True)
class _BarState:
    """A bar's number among those of its process, what was sent of it last, whether it has closed, and its last numbers."""

    number: int
    sent: Progress | None = None
    left: bool = False
    numbers: dict[str, float] = field(default_factory=dict)


def _progress(bar: Any, number: int, *, closed: bool) -> Progress:
    facts = bar.format_dict
    scale = facts["unit_scale"]
    # a number is a factor, as in tqdm's own `format_meter`; True only asks for k and M
    factor = 1 if scale in {True, False, None} else scale
    done, total, rate = facts["n"], facts["total"], facts["rate"]
    if rate is None or closed:
        rate = (done - facts["initial"]) / facts["elapsed"] if facts["elapsed"] > 0 else None
    return Progress(
        rank=getattr(outlet(), "rank", 0),
        label=(facts["prefix"] or "").strip().removesuffix(":") or _NAMELESS,
        done=_plain(done, factor),
        total=None if total is None else _plain(total, factor),
        time=time.time(),
        rate=None if rate is None else float(rate * factor),
        unit=str(facts["unit"]),
        closed=closed,
        bar=f"tqdm {number}",
        note=str(facts["postfix"] or ""),
    )


def _shown(progress: Progress) -> tuple[object, ...]:
    return progress.done, progress.total, progress.label, progress.note


def _plain(number: Any, factor: Any) -> float:
    # numpy's numbers, and tensors, count too
    return number * factor if type(number) is type(factor) is int else float(number * factor)


def _as_text(notebook: ModuleType) -> None:
    """Take from a notebook's bars what makes them widgets: what is left are bars of text, with one argument that is passed over."""
    widget: Any = vars(notebook)["tqdm_notebook"]
    for name, member in list(vars(widget).items()):
        if not name.startswith("__") and (callable(member) or isinstance(member, (property, staticmethod))):
            delattr(widget, name)
    del widget.__iter__

    def __init__(self: Any, *args: Any, display: bool = True, **kwargs: Any) -> None:  # noqa: ARG001, N807
        super(widget, self).__init__(*args, **kwargs)

    widget.__init__ = __init__
