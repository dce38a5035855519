"""The knobs of a rank: numbers that are changed while it trains, on all ranks after the same step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from functools import partial

from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.events.model import KnobValue
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.rank.step_hold import current_step_hold
from accelerate_nb.rank_local import RankLocal


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
    """A rank's knobs by their names, which the thread that trains declares and changes."""

    def __init__(self) -> None:
        self._knobs: dict[str, Knob] = {}

    def declare(self, name: str, value: float, least: float | None, most: float | None) -> Knob:
        """The knob of this name, with the value that it was changed to where the same was declared before."""
        made = Knob(name, value, least, most)
        known = self._knobs.get(name)
        if known is not None and (known.declared, known.least, known.most) == (made.declared, least, most):
            return known
        self._knobs[name] = made
        self._report(made, changed=False)
        return made

    def change(self, name: str, value: float) -> None:
        """Give a knob another value, where it is there."""
        if (knob := self._knobs.get(name)) is not None:
            knob.value = value
            self._report(knob, changed=True)

    def _report(self, knob: Knob, *, changed: bool) -> None:
        if (listener := outlet()) is not None:
            steps, now = current_step_hold().steps, time.time()
            emit(KnobValue(listener.rank, knob.name, knob.value, steps, knob.least, knob.most, now, changed))


_boards = RankLocal(KnobBoard)


def current_knobs() -> KnobBoard:
    """The knobs of this rank."""
    return _boards.get()


def change_after(number: int, name: str, value: float, after: int | None) -> None:
    """Let this rank go on, which holds for this change, and change the knob after so many steps; with `None`, not at all."""
    hold = current_step_hold()
    if after is None and not hold.makes_steps:
        sys.stderr.write(
            "A knob was not changed: no optimizer was given to `Accelerator.prepare`, whose steps it could follow.\n"
        )
    hold.go_on(number, after, partial(current_knobs().change, name, value))


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
