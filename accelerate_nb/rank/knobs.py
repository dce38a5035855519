"""The knobs of a rank: numbers that are changed while it trains, on all ranks after the same step."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.events.model import KnobHeld, KnobValue
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.rank_local import RankLocal
from accelerate_nb.user_warnings import warn_user

# How long a rank waits at the end of a step to learn which one a change follows; the reply takes milliseconds.
HOLD_TIMEOUT = 5.0


class Knob:
    """
    A number of the training that a person can change while it runs; `Accelerator.knob` declares one.

    `value` is its value now, and `float(knob)` as well.
    """

    def __init__(self, name: str, value: float, least: float | None, most: float | None) -> None:
        self.name, self.least, self.most = name, least, most
        self.declared = self.value = checked_value(name, value, least, most)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"Knob({self.name!r}, {self.value:g})"


class KnobBoard:
    """
    A rank's knobs, and the change that is under way, between the thread that receives it and the one that trains.

    Ranks agree on a step as they do for a stop (`StopRequest`): each waits at the end of its step until it knows the step that all
    change after, one more than the farthest has made. A change that not all ranks can make is made by none.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._knobs: dict[str, Knob] = {}
        self._held: int | None = None
        self._steps = 0
        self._makes_steps = False
        # what is to be changed, and after how many steps, in the order of steps
        self._due: list[tuple[str, float, int]] = []

    # ------------------------------------------------------------------------------------------- the thread that trains

    def begin(self) -> None:
        """Note that steps are going to be made in this process."""
        self._makes_steps = True

    def declare(self, name: str, value: float, least: float | None, most: float | None) -> Knob:
        """The knob of this name, with the value that it was changed to where the same was declared before."""
        made = Knob(name, value, least, most)
        known = self._knobs.get(name)
        if known is not None and (known.declared, known.least, known.most) == (made.declared, least, most):
            return known
        self._knobs[name] = made
        self._report(made, changed=False)
        return made

    def stepped(self) -> None:
        """Make the changes that are due after this step; waits a moment where that is not known yet."""
        self._steps += 1
        if self._held is None and not self._due:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._held is None, HOLD_TIMEOUT):
                self._held = None
                warn_user("A knob was not changed: not every rank has replied within some seconds.", RuntimeWarning)
            due = [change for change in self._due if change[2] <= self._steps]
            self._due = self._due[len(due) :]
        for name, value, _ in due:
            if (knob := self._knobs.get(name)) is not None:
                knob.value = value
                self._report(knob, changed=True)

    def _report(self, knob: Knob, *, changed: bool) -> None:
        if (listener := outlet()) is not None:
            now = time.time()
            emit(KnobValue(listener.rank, knob.name, knob.value, self._steps, knob.least, knob.most, now, changed))

    # --------------------------------------------------------------------------------------------- the thread that receives

    def hold(self, rank: int, number: int) -> KnobHeld:
        """Wait at the end of this step; how far the rank is."""
        with self._changed:
            if not self._makes_steps:
                sys.stderr.write(
                    "A knob was not changed: no optimizer was given to `Accelerator.prepare`, whose steps it could follow.\n"
                )
                return KnobHeld(rank, number, None)
            # first the request, then the position: whoever has made more steps than are reported has seen it
            self._held = number
            return KnobHeld(rank, number, self._steps)

    def change(self, number: int, name: str, value: float, after: int | None) -> None:
        """Change a knob after a step; with `None`, not at all."""
        with self._changed:
            if self._held != number:
                return
            self._held = None
            if after is not None:
                self._due = [*self._due, (name, value, after)]
            self._changed.notify_all()

    def restart(self) -> None:
        """Forget what is under way, and count steps anew."""
        with self._changed:
            self._held, self._due = None, []
            self._steps = 0
            self._changed.notify_all()

    def __reduce__(self) -> tuple[Any, ...]:
        # an optimizer that refers to this one may be copied, and be loaded in another process
        return current_knobs, ()


_boards = RankLocal(KnobBoard)


def current_knobs() -> KnobBoard:
    """The knobs of this rank."""
    return _boards.get()


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
