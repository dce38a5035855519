"""What a rank does at a boundary that all ranks share: it stops, or changes a knob, after the same step as the others."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError, StopRequested
from accelerate_nb.events.event_types import HeldAt, KnobValue, StateChange
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.rank.step_profiler import current_step_profiler
from accelerate_nb.user_warnings import warn_user

# How long a rank waits at a boundary to learn after which one to act; the reply takes milliseconds.
HOLD_TIMEOUT = 10.0
# The number of the request to hold for a stop; those for knobs begin with 1.
STOP = 0


class StopPoint(NamedTuple):
    """The point where a rank stops: after so many steps, or so many checks without a step, by an exception or by itself."""

    steps: int
    raises: bool
    stepless_checks: int | None = None


class StepHold:
    """Requests to act after a step that all ranks share, between the thread that receives and that which trains."""

    # To agree on a step in every step would cost a collective. So a rank that is to hold reports its steps and waits at
    # the end of the one that it is in; the kernel replies with the step after which all act, one more than the farthest
    # rank has made. Who waits in a collective for a rank that holds is waited for no longer than the reply takes.
    # Checks without a step (in an evaluation) are counted and agreed on in the same way, and a rank stops at whichever
    # it comes to first. A check after a step, or in the midst of one, is none: the loop is to end after a whole step.

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._knobs: dict[str, Knob] = {}
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.stopped_at: str | None = None
        self.checks = False
        self._stepless_checks = 0
        self._begun: float | None = None
        self._stepped_at = 0.0
        self._checked_at = 0.0
        self._longest_check_gap = 0.0
        self._is_after_step = False
        self._is_in_step = False
        self._saving = 0
        # the numbers of the requests that this rank waits for, which knobs get which value after how many steps, and where it stops
        self._held: set[int] = set()
        self._due: list[tuple[int, str, float]] = []
        self._stop: StopPoint | None = None

    def restart(self) -> None:
        """Forget the same for another function, which may have the optimizers of the one before."""
        made_steps = self.makes_steps
        self.reset()
        if made_steps:
            self.begin()

    @property
    def makes_steps(self) -> bool:
        """Whether an optimizer of this process was prepared."""
        return self._begun is not None

    # ------------------------------------------------------------------------------------------- the thread that trains

    def begin(self) -> None:
        if self._begun is None:
            self._begun = time.monotonic()

    def stepped(self) -> None:
        """Count a step, and do what is due after it; raises `StopRequested` where the function ends here."""
        self._stepped_at = time.monotonic()
        self._is_in_step, self._is_after_step = False, True
        self.steps += 1
        current_step_profiler().report_first_step()
        self._come_to(f"after step {self.steps}")

    def went_backward(self) -> None:
        """Note a backward: the next step has begun, where this process makes steps."""
        self._is_in_step = self._begun is not None

    def checked(self) -> bool:
        """Whether the function is to stop; returns when it may go on."""
        before, self._checked_at = self._checked_at, time.monotonic()
        if self._is_after_step or self._is_in_step:
            self._is_after_step = False
        else:
            if before:
                self._longest_check_gap = max(self._longest_check_gap, self._checked_at - before)
            self._stepless_checks += 1
        self.checks = True
        self._come_to("at stop_requested")
        return self.stopped_at is not None

    def declare_knob(self, name: str, value: float, least: float | None, most: float | None) -> Knob:
        """The knob of this name, with the value that it was changed to where the same was declared before."""
        # one that is infinite is none; one that is no number bounds nothing
        least, most = (None if bound is None or not math.isfinite(bound) else bound for bound in (least, most))
        made = Knob(name, value, least, most)
        known = self._knobs.get(name)
        if known is not None and (known.declared, known.least, known.most) == (made.declared, least, most):
            return known
        self._knobs[name] = made
        self._report_knob(made, changed=False)
        return made

    def _report_knob(self, knob: Knob, *, changed: bool) -> None:
        if (listener := outlet()) is not None:
            now = time.time()
            emit(KnobValue(listener.rank, knob.name, knob.value, self.steps, knob.least, knob.most, now, changed))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block that writes what was trained, and is not to be cut off for a stop."""
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1

    def _come_to(self, where: str) -> None:
        if not self._held and not self._due and self._stop is None:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: not self._held, HOLD_TIMEOUT):
                self._held.clear()
                warn_user(
                    "A requested stop or change of a knob is late or left out: not every rank has replied.",
                    RuntimeWarning,
                )
            due = [change for change in self._due if change[0] <= self.steps]
            self._due = [change for change in self._due if change[0] > self.steps]
            stop = self._stop
            if stop is not None:
                checks = stop.stepless_checks
                if self.steps >= stop.steps or (checks is not None and self._stepless_checks >= checks):
                    self._stop, self.stopped_at = None, where
                else:
                    stop = None
        for _, name, value in due:
            if (knob := self._knobs.get(name)) is not None:
                knob.value = value
                self._report_knob(knob, changed=True)
        if stop is None:
            return
        if (listener := outlet()) is not None:
            emit(StateChange(listener.rank, "stopping", time.time(), where))
        if stop.raises:
            raise StopRequested(f"a stop was requested, and every rank has come to it: {where}")

    # --------------------------------------------------------------------------------------------- the thread that receives

    def hold(self, rank: int, number: int) -> HeldAt:
        """Let the process wait at its next boundary, where it comes to one; how far it is."""
        with self._changed:
            if not self.makes_steps and not self.checks:
                return HeldAt(rank, number, None)
            # first the request, then the position: whoever has made more steps than are reported has seen it
            self._held.add(number)
            steps, checks = self.steps, self._stepless_checks
            # what comes after the steps, an evaluation perhaps, is none of their time
            pace = (self._stepped_at - self._begun) / steps if steps and self._begun is not None else 0.0
            # samples take longer or shorter, and of the first check nothing is known but its time
            check_gap = self._longest_check_gap or (time.monotonic() - self._checked_at if checks else 0.0)
            made = steps if self.makes_steps else None
            return HeldAt(rank, number, made, max(pace, check_gap), self.checks, self._saving > 0, checks)

    def change_knob_after(self, number: int, name: str, value: float, after: int | None) -> None:
        """Let the process go on, and change a knob after so many steps; with `None`, or where it has waited too long, not at all."""
        if after is None and not self.makes_steps:
            sys.stderr.write(
                "A knob was not changed: no optimizer was given to `Accelerator.prepare`, whose steps it could follow.\n"
            )
        with self._changed:
            if number in self._held:
                self._held.remove(number)
                self._due += [] if after is None else [(after, name, value)]
                self._changed.notify_all()

    def stop_at(self, point: StopPoint) -> None:
        """Let the process go on, and stop there: by `StopRequested`, or as its function sees to it."""
        with self._changed:
            self._held.discard(STOP)
            self._stop = point
            self._changed.notify_all()

    def __reduce__(self) -> tuple[Any, ...]:
        # an optimizer that refers to this one may be copied, and be loaded in another process
        return current_step_hold, ()


_hold = StepHold()


def current_step_hold() -> StepHold:
    """The boundaries of this rank."""
    return _hold


# --------------------------------------------------------------------------------------------------------------------- knobs


class Knob:
    """A number of the training that a person can change while it runs; its `value`, or `float(knob)`."""

    def __init__(self, name: str, value: float, least: float | None, most: float | None) -> None:
        self.name, self.least, self.most = name, least, most
        self.declared = self.value = checked_value(name, value, least, most)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"Knob({self.name!r}, {self.value:g})"


def checked_value(name: str, value: object, least: float | None, most: float | None) -> float:
    """The value that a knob is given; raises `ConfigurationError` for what is no finite number, or out of its bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigurationError(
            f"Knob {name!r} was given {value!r}, and takes finite numbers. Pass a number such as 0.001."
        )
    if (least is not None and value < least) or (most is not None and value > most):
        lower = "" if least is None else f"at least {least:g}"
        upper = "" if most is None else f"at most {most:g}"
        bounds = " and ".join(filter(None, (lower, upper)))
        raise ConfigurationError(
            f"Knob {name!r} was given {value:g}, and takes {bounds}. Pass a value between its bounds."
        )
    return float(value)


def checked_change(knobs: Mapping[str, KnobValue], name: str, value: object) -> float:
    """The value that a knob of a run is to be changed to; raises `ConfigurationError` for an unknown knob or a bad value."""
    if (knob := knobs.get(name)) is None:
        known = ", ".join(map(repr, knobs)) or "none yet"
        hint = did_you_mean(name, knobs, "Declare it in the training: accelerator.knob(name, value).")
        raise ConfigurationError(f"Knob {name!r} was to be changed, and this run's knobs are: {known}. {hint}")
    return checked_value(name, value, knob.least, knob.most)
