"""The base of trackers, which keep a run's settings, numbers and pictures."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from accelerate_nb.errors import IncompleteTrackerError
from accelerate_nb.rank.event_sink import outlet, report_logged
from accelerate_nb.runtime.observability.logging import get_logger
from accelerate_nb.runtime.world.registry import current_world

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

logger = get_logger("accelerate_nb.tracking")

_REQUIRED = ("name", "requires_logging_directory", "tracker")


def on_main_process(function: F) -> F:
    """
    A decorator for a tracker's methods: they do nothing on other processes than the main one.

    A tracker whose `main_process_only` is false, or not there, runs them everywhere. It is looked up at the call, so a class
    can be defined, and a tracker made, before the processes are connected.
    """

    @functools.wraps(function)
    def perhaps(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not current_world().is_main:
            return None
        return function(self, *args, **kwargs)

    return perhaps  # type: ignore[return-value]  # called with the same arguments


def all_on_main_process(tracker_class: C) -> C:
    """A decorator for a tracker: `on_main_process` for every public method that the class itself defines."""
    for name, item in list(vars(tracker_class).items()):
        if isinstance(item, FunctionType) and not name.startswith("_"):
            setattr(tracker_class, name, on_main_process(item))
    return tracker_class


class GeneralTracker:
    """
    The base of all trackers; a subclass sets its `name`, whether it `requires_logging_directory`, and gives its `tracker`.

    `tracker` is a property with the object underneath (wandb's run, TensorBoard's writer). `IncompleteTrackerError`, a
    `NotImplementedError`, names which of the three are missing. With `main_process_only=False` the methods that are decorated
    with `on_main_process` run on every process that calls them.

    >>> class Shout(GeneralTracker):
    ...     name, requires_logging_directory, tracker = "shout", False, None
    ...
    ...     def log(self, values, step=None, **kwargs):
    ...         print(step, values)
    >>> accelerator = Accelerator(log_with=Shout())  # doctest: +SKIP
    """

    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        # `tracker` is often known only once the tracker was started: that its class has it is enough
        missing = [item for item in _REQUIRED if not _blank and item not in dir(self)]
        if missing:
            names = ", ".join(f"`{item}`" for item in missing)
            raise IncompleteTrackerError(
                f"{type(self).__name__} is missing the following required attributes: {names}. "
                "Define them in the class: `name` is a string, `requires_logging_directory` true or false, and `tracker` a "
                "property with the object underneath."
            )

    @staticmethod
    def _is_available() -> bool:
        """Whether what it needs is installed."""
        return True

    def start(self) -> None:
        """Begin; called by `Accelerator.init_trackers`, when the processes are connected."""

    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Keep the run's settings: names to numbers, strings, booleans or `None`."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> Any:
        """Keep values by name, as those of `step` where one is given; `kwargs` go to the package."""

    def finish(self) -> None:
        """End, with everything kept."""


class PackageTracker(GeneralTracker):
    """A tracker that hands everything to a package's own object, which it keeps as the attribute of the name `_kept_as`."""

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool] = False
    _kept_as: ClassVar[str] = "writer"

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name: Any = run_name
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The package's own object, there once the tracker was started."""
        return getattr(self, self._kept_as)


@all_on_main_process
class RunTracker(PackageTracker):
    """A tracker whose package gives a run to be logged to, its attribute `run`; a subclass begins it in `start`, with `init_kwargs`."""

    main_process_only = False
    _kept_as: ClassVar[str] = "run"

    run: Any

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep whatever the package can keep by name: numbers, its own media; `kwargs` go to the run's `log`."""
        self.run.log(plain(values), step=step, **kwargs)

    def finish(self) -> None:
        self.run.finish()


class NullTracker(GeneralTracker):
    """Stands for a tracker of the main process on all others: every method does nothing."""

    def __init__(self) -> None:
        super().__init__(_blank=True)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


def plain(value: Any) -> Any:
    """The value, at any depth of mappings a number where it is a tensor (not on the meta device) or an array of one element."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else value
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item() if value.size == 1 else value
    return value


def flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names with values that are no mappings: `{"loss": {"train": 1}}` gives `"loss/train", 1`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def settings(values: Any) -> Any:
    """A configuration as numbers, strings, booleans, `None`, lists and dictionaries by strings; anything else becomes its `str`."""
    values = plain(values)
    if values is None or type(values) in {bool, int, float, str}:
        return values
    if isinstance(values, (int, float, str)):
        # YAML would write an enum that is also a string as a Python object
        return next(
            plain_type(getattr(values, "value", values))
            for plain_type in (int, float, str)
            if isinstance(values, plain_type)
        )
    if isinstance(values, Mapping):
        return {str(name): settings(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [settings(value) for value in values]
    return str(values)


class PanelTracker(GeneralTracker):
    """Shows the numbers that each process logs in the run's display, nested names joined by a slash; silent without a display."""

    name: ClassVar[str] = "panel"
    requires_logging_directory: ClassVar[bool] = False
    main_process_only = False

    @property
    def tracker(self) -> PanelTracker:
        """The tracker itself: there is nothing underneath."""
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.log_at(time.time(), values, step)

    def log_at(self, now: float, values: dict[str, Any], step: int | None = None) -> None:
        """Show values as those of a moment."""
        # a tensor on a device is waited for only where its value is shown
        count = None if outlet() is None else plain(step)
        shown_step = int(count) if isinstance(count, (int, float)) and math.isfinite(count) else None
        report_logged(values, shown_step, now)
