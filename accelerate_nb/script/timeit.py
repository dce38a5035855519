"""`%time` in a script, and `%timeit` as scripts of earlier exports call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from IPython.core.magics.execution import TimeitResult

Value = TypeVar("Value")


class Clock:
    """
    Measures from when it is made; as a context manager it prints at the end of its block how long that took.

    >>> with Clock():  # doctest: +SKIP
    ...     total = sum(range(1000))
    CPU times: user 31 μs, sys: 0 ns, total: 31 μs
    Wall time: 30.8 μs
    """

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._cpu = _cpu()

    def told(self, value: Any = None) -> Any:
        """Print the time up to now; returns its argument, which was computed before the call."""
        wall = time.perf_counter() - self._wall
        user, system = (now - then for now, then in zip(_cpu(), self._cpu, strict=True))
        print(f"CPU times: user {_text(user)}, sys: {_text(system)}, total: {_text(user + system)}")
        print(f"Wall time: {_text(wall)}")
        return value

    def __enter__(self) -> Clock:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.told()


def timed(function: Callable[[], Value]) -> Value:
    """
    Call a function and print how long it took, as `%time expression` does; returns the function's result.

    >>> timed(lambda: 6 * 7)  # doctest: +SKIP
    CPU times: user 2 μs, sys: 0 ns, total: 2 μs
    Wall time: 2.15 μs
    42
    """
    with Clock():
        return function()


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
) -> TimeitResult:
    """
    Measure code and print the result; returns it, as `%timeit -o` does.

    >>> measured("sum(range(n))", {"n": 10}, loops=1, repeat=1)  # doctest: +SKIP
    1.2 μs ± 0 ns per loop (mean ± std. dev. of 1 run, 1 loop each)
    """
    from accelerate_nb.script.ipython import cell_magic

    flags = f"-o -n {loops} -r {repeat} -p {digits}" + " -c" * cpu + " -q" * quiet
    timing: TimeitResult = cell_magic("timeit", f"{flags} {setup}", code, dict(names))
    return timing


def timeit(code: str, names: Mapping[str, Any], **options: Any) -> None:
    """
    Measure code and print the result, as `%timeit` does; `options` are those of `measured`.

    >>> timeit("sum(range(n))", {"n": 10}, loops=1, repeat=1)  # doctest: +SKIP
    1.2 μs ± 0 ns per loop (mean ± std. dev. of 1 run, 1 loop each)
    """
    measured(code, names, **options)


def _text(seconds: float) -> str:
    """A time as IPython writes it; loading IPython is not part of what was measured."""
    from IPython.core.magics.execution import _format_time

    return str(_format_time(seconds))  # type: ignore[no-untyped-call]  # IPython's own


def _cpu() -> tuple[float, float]:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime
