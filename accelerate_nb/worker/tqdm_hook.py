"""How the progress bars of a worker reach the notebook: every tqdm bar says `Progress` whenever it is drawn."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from weakref import ReferenceType, WeakSet, ref

from accelerate_nb.events.emit import emit, outlet
from accelerate_nb.events.model import Progress
from accelerate_nb.own import Own

# A bar that is drawn more often (`mininterval=0`) is told less often; tqdm's own pace is a tenth of a second.
_BETWEEN = 0.09
_PLACE = "_accelerate_nb_place"
_NAMELESS = "progress"


def install() -> None:
    """
    From now on every bar of this process is told of, whatever kind of tqdm it is, and drawn as text as it was.

    Its drawn line is an open line of the rank's standard error until it ends; `events.bars.draws_a_bar` knows it, so that
    what shows bars need not show that line too. Widgets can't work from here, so a `tqdm.notebook` bar is drawn as text.
    Where tqdm isn't loaded yet it is told of when it is: nothing is imported here.
    """
    for name, hook in _hooks().items():
        if name in sys.modules:
            hook(sys.modules[name])
        else:
            sys.meta_path.insert(0, _WhenLoaded(name, hook))


def _hooks() -> dict[str, Callable[[ModuleType], None]]:
    watch = _Watch()
    return {"tqdm.std": lambda module: watch.keep(module.tqdm), "tqdm.notebook": _as_text}


class _WhenLoaded(MetaPathFinder):
    """Calls `hook` with a module right after it has been loaded."""

    def __init__(self, name: str, hook: Callable[[ModuleType], None]) -> None:
        self._name, self._hook = name, hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own specification, whose loader calls the hook at its end; `None` for all others."""
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader, made for this one module
        return spec


class _Watch:
    """Has the bars of this process tell what they do, each to its rank."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._told = Own(_Told)

    def keep(self, tqdm: Any) -> None:
        """Make a class of bars, which all other kinds of bars inherit from, say what its bars do."""
        # by these a bar knows below which others it is drawn
        tqdm._instances = _Instances(tqdm._instances)
        # at these three moments a bar of any kind has something new to show
        tqdm.__init__ = self._telling(tqdm.__init__)
        tqdm.refresh = self._telling(tqdm.refresh)
        tqdm.close = self._telling(tqdm.close)

    def _telling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def told(bar: Any, *args: Any, **kwargs: Any) -> Any:
            done = method(bar, *args, **kwargs)
            # not in a process of a data loader: the socket is its parent's
            if os.getpid() == self._process:
                self._told.get().look_at(bar)
            return done

        return told


class _Instances:
    """The bars of the rank that asks, in the place of those of a process."""

    def __init__(self, before: Iterable[Any]) -> None:
        self._own: Own[WeakSet[Any]] = Own(lambda: WeakSet(before))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own.get())

    def __len__(self) -> int:
        return len(self._own.get())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own.get(), name)


class _Told:
    """
    The bars of this rank that are open, each in the first place that was free when it was first drawn.

    A place is what tells nested bars apart, and keeps its name when a loop makes its inner bar anew.
    """

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._last: dict[int, float] = {}
        self._waiting: dict[int, tuple[ReferenceType[Any], _Place]] = {}

    def look_at(self, bar: Any) -> None:
        """Tell of a bar, or do so a moment later, where it has something new to show."""
        closed = bool(getattr(bar, "disable", True))
        place: _Place | None = getattr(bar, _PLACE, None)
        if place is None:
            if closed or not _is_drawn(bar):
                return
            place = _Place(self._take())
            setattr(bar, _PLACE, place)
        if place.left:
            return
        if closed:
            place.left = True
            self._taken.discard(place.number)
        if self._due_in(place.number) <= 0 or (place.told and (closed or bar.n == bar.total)):
            self._tell(_progress(bar, place.number, closed=closed), place)
        elif not closed:
            self._tell_soon(bar, place)

    def _due_in(self, number: int) -> float:
        """Seconds until it is time for more of a place: a loop may make a thousand short bars in it each second."""
        return self._last.get(number, -_BETWEEN) + _BETWEEN - time.monotonic()

    def _tell(self, said: Progress, place: _Place) -> None:
        place.told = said
        self._last[place.number] = time.monotonic()
        emit(said)

    def _tell_soon(self, bar: Any, place: _Place) -> None:
        """The bar may not move again: what is drawn too early is told a moment later."""
        is_waited_for = place.number in self._waiting
        self._waiting[place.number] = ref(bar), place
        if not is_waited_for:
            later = threading.Timer(max(0.0, self._due_in(place.number)), self._tell_late, (place.number,))
            later.daemon = True
            later.start()

    def _tell_late(self, number: int) -> None:
        """In a thread of its own: tell of the newest bar in a place, where it is still there and has moved."""
        known, place = self._waiting.pop(number)
        bar = known()
        if bar is None or place.left:
            return
        said = _progress(bar, place.number, closed=False)
        if place.told is not None and _shown(said) == _shown(place.told):
            return
        self._tell(said, place)
        if place.left:
            # it closed meanwhile, and that is to be told last
            self._tell(_progress(bar, place.number, closed=True), place)

    def _take(self) -> int:
        number = next(number for number in range(len(self._taken) + 1) if number not in self._taken)
        self._taken.add(number)
        return number


@dataclass(slots=True)
class _Place:
    """Where a bar stands among those of its process; what was told of it last, and whether it has left."""

    number: int
    told: Progress | None = None
    left: bool = False


def _is_drawn(bar: Any) -> bool:
    """Whether a bar that was made to wait before it is drawn has waited."""
    return bar.delay <= 0 or (hasattr(bar, "start_t") and bar._time() >= bar.start_t + bar.delay)


def _progress(bar: Any, place: int, *, closed: bool) -> Progress:
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
        bar=f"tqdm {place}",
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
