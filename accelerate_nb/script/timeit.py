"""What `%time` and `%timeit` measure and say, in a script."""

from __future__ import annotations

import math
import sys
import time
import timeit as _timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

Value = TypeVar("Value")

# Enough loops for this many seconds, as IPython has it.
_LONG_ENOUGH = 0.2
_MOST_LOOPS = 10**9


class Clock:
    """
    Measures from when it is made; as a context manager it says at the end of its block how long that took.

    >>> with Clock():  # doctest: +SKIP
    ...     total = sum(range(1000))
    CPU times: user 31 μs, sys: 0 ns, total: 31 μs
    Wall time: 30.8 μs
    """

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._cpu = _cpu()

    def told(self, value: Any = None) -> Any:
        """Say what was measured up to now; gives back what it is given, which was made before it is called."""
        wall = time.perf_counter() - self._wall
        user, system = (now - then for now, then in zip(_cpu(), self._cpu, strict=True))
        print(f"CPU times: user {duration(user)}, sys: {duration(system)}, total: {duration(user + system)}")
        print(f"Wall time: {duration(wall)}")
        return value

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.told()


def timed(function: Callable[[], Value]) -> Value:
    """
    Call a function and say how long it took, as `%time expression` does; gives what the function gives.

    >>> timed(lambda: 6 * 7)  # doctest: +SKIP
    CPU times: user 2 μs, sys: 0 ns, total: 2 μs
    Wall time: 2.15 μs
    42
    """
    with Clock():
        return function()


@dataclass(frozen=True, slots=True)
class Timing:
    """What `measured` found: seconds of each run of `loops` loops."""

    loops: int
    all_runs: tuple[float, ...]
    digits: int = 3

    @property
    def repeat(self) -> int:
        """How many runs there were."""
        return len(self.all_runs)

    @property
    def timings(self) -> list[float]:
        """Seconds a loop, of each run."""
        return [seconds / self.loops for seconds in self.all_runs]

    @property
    def best(self) -> float:
        """Seconds a loop, of the fastest run."""
        return min(self.timings)

    @property
    def worst(self) -> float:
        """Seconds a loop, of the slowest run."""
        return max(self.timings)

    @property
    def average(self) -> float:
        """Mean seconds a loop."""
        return math.fsum(self.timings) / self.repeat

    @property
    def stdev(self) -> float:
        """How far the runs are from their mean."""
        mean = self.average
        return math.sqrt(math.fsum((one - mean) ** 2 for one in self.timings) / self.repeat)

    def __str__(self) -> str:
        runs, loops = (
            f"{count:,} {noun}{'s' * (count != 1)}" for count, noun in ((self.repeat, "run"), (self.loops, "loop"))
        )
        sign = _sayable("±", "+-")
        each = f"{duration(self.average, self.digits)} {sign} {duration(self.stdev, self.digits)} per loop"
        return f"{each} (mean {sign} std. dev. of {runs}, {loops} each)"


def measured(
    code: str,
    names: Mapping[str, Any],
    *,
    setup: str = "pass",
    loops: int = 0,
    repeat: int = 7,
    digits: int = 3,
    cpu: bool = False,
    quiet: bool = False,
) -> Timing:
    """
    Measure code with the standard library's `timeit`, and say it; gives what was measured, as `%timeit -o` does.

    >>> measured("sum(range(n))", {"n": 10}, loops=1, repeat=1)  # doctest: +SKIP
    1.2 μs ± 0 ns per loop (mean ± std. dev. of 1 run, 1 loop each)
    """
    clock = time.process_time if cpu else time.perf_counter
    timer = _timeit.Timer(code, setup, timer=clock, globals=dict(names))
    if not loops:
        loops = next(count for count in _growing() if count == _MOST_LOOPS or timer.timeit(count) >= _LONG_ENOUGH)
    timing = Timing(loops, tuple(timer.repeat(repeat, loops)), digits)
    if not quiet:
        print(timing)
    return timing


def timeit(code: str, names: Mapping[str, Any], **options: Any) -> None:
    """
    Measure code and say it, as `%timeit` does; `options` are those of `measured`.

    >>> timeit("sum(range(n))", {"n": 10}, loops=1, repeat=1)  # doctest: +SKIP
    1.2 μs ± 0 ns per loop (mean ± std. dev. of 1 run, 1 loop each)
    """
    measured(code, names, **options)


def duration(seconds: float, digits: int = 3) -> str:
    """
    A time as a person reads it.

    >>> duration(0.0123), duration(3723)
    ('12.3 ms', '1h 2min 3s')
    """
    if seconds >= 60:
        return " ".join(_parts(seconds))
    order = min(-(math.floor(math.log10(seconds)) // 3), 3) if seconds > 0 else 3
    return f"{seconds * 1000**order:.{digits}g} {('s', 'ms', _sayable('μs', 'us'), 'ns')[order]}"


def _parts(seconds: float) -> list[str]:
    found = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            found.append(f"{int(count)}{unit}")
    return found


def _sayable(sign: str, otherwise: str) -> str:
    """A sign, if it can be written where output goes."""
    try:
        sign.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return otherwise
    return sign


def _growing() -> list[int]:
    return [10**power for power in range(10)]


def _cpu() -> tuple[float, float]:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime
