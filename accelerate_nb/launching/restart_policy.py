"""The decision after a failed attempt of a run: start all ranks again, or give up, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

# Errors that another attempt would meet again, by the names of their classes (a subclass is one, too), with the reason.
NEVER_HEALS: dict[str, str] = {
    "SyntaxError": "the code can't be read",
    "ImportError": "a module is missing",
    "NameError": "a name is missing",
    "NotImplementedError": "something is not implemented",
    "FileNotFoundError": "a file is missing",
    "NotADirectoryError": "a path is wrong",
    "IsADirectoryError": "a path is wrong",
    "PermissionError": "a permission is missing",
    "PayloadError": "something can't travel to another process",
    "ConfigurationError": "a setting is wrong",
    "KeyboardInterrupt": "it was interrupted",
}
# The pause doubles with each restart, up to so many seconds.
LONGEST_DELAY = 60.0
# How many attempts in a row may end before their first step: code for Accelerate's launcher counts on some.
MOST_EARLY = 5
# An attempt without a step, as of an evaluation, has got somewhere where it lasted so many seconds.
_LONG_ATTEMPT = 300.0


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failed attempt of a run: its first cause in one line, and the names of that one's class and bases."""

    reason: str
    exceptions: tuple[str, ...] = ()
    has_stepped: bool = False
    seconds: float = 0.0
    was_stopped: bool = False
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class StartAgain:
    """All ranks start again after a pause of `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run ends; `reason` is for people, and empty where no restart was to be expected."""

    reason: str = ""


def decide(attempts: Sequence[FailedAttempt], max_restarts: int, restart_delay: float) -> StartAgain | GiveUp:
    """The decision after the last of these attempts has failed; the pause in seconds doubles each time."""
    last = attempts[-1]
    if last.was_stopped or last.timed_out or max_restarts == 0:
        return GiveUp()
    if (name := next((name for name in last.exceptions if name in NEVER_HEALS), None)) is not None:
        return GiveUp(f"a restart does not heal a {last.exceptions[0]}: {NEVER_HEALS[name]}")
    if len(attempts) > max_restarts:
        return GiveUp(f"max_restarts={max_restarts} is used up")
    got_somewhere = (attempt.has_stepped or attempt.seconds >= _LONG_ATTEMPT for attempt in attempts[-MOST_EARLY:])
    if len(attempts) >= MOST_EARLY and not any(got_somewhere):
        return GiveUp(f"{MOST_EARLY} attempts in a row ended before their first optimizer step")
    return StartAgain(min(restart_delay * 2.0 ** min(len(attempts) - 1, 60), LONGEST_DELAY))


def explanation(attempts: Sequence[FailedAttempt], decision: GiveUp) -> str:
    """The decision as a paragraph of the run's error, with every attempt; empty where there is nothing to explain."""
    if not decision.reason:
        return ""
    lines = [f"attempt {number} ({attempt.seconds:.1f} s): {attempt.reason}" for number, attempt in enumerate(attempts)]
    return "\n".join([f"It was not started again: {decision.reason}.", *(lines if len(lines) > 1 else ())])
