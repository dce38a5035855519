"""Methods that show the progress of a training."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.rank.event_sink import log_call
from accelerate_nb.rank.step_hold import Knob, current_step_hold
from accelerate_nb.runtime.accelerator.step import StepMethods
from accelerate_nb.runtime.observability.profiling import ProfileKwargs, profiled
from accelerate_nb.runtime.trackers.base import NullTracker, PanelTracker, plain
from accelerate_nb.runtime.trackers.registry import made
from accelerate_nb.user_warnings import warn_user


class TrackingMethods(StepMethods):
    """The methods of an `Accelerator` that log, track and print."""

    log_with: list[Any]
    panel: PanelTracker
    profile_handler: ProfileKwargs | None
    trackers: list[Any]
    _ended_trackers: tuple[Any, ...] = ()
    _has_warned_of_trackers: bool = False

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """
        Begin a run of the project with every tracker of `log_with`, on the main process, and keep its `config` with it.

        `init_kwargs` holds, by the trackers' names, what else each of them is given. A run that was begun before ends first.
        The panel needs no beginning.

        >>> accelerator.init_trackers("digits", {"lr": 0.1}, {"wandb": {"tags": ["first"]}})  # doctest: +SKIP
        """
        if not self.is_main_process:
            return
        self._finish_trackers()
        self.trackers, self._ended_trackers = [], ()
        for wanted in self.log_with:
            tracker = made(wanted, project_name, self.logging_dir, init_kwargs or {})
            tracker.start()
            # only now: one that could not begin can't be ended either
            self.trackers.append(tracker)
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(config)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """
        A block that torch's profiler watches; `profile_handler` stands before the one among `kwargs_handlers`.

        With `output_trace_dir` each process writes `profile_<rank>.json`, a Chrome trace, and all of them must leave the block.

        >>> with accelerator.profile(ProfileKwargs(output_trace_dir="traces")) as profiler:  # doctest: +SKIP
        ...     train()
        """
        return profiled(profile_handler or self.profile_handler or ProfileKwargs(), self.world)

    def knob(self, name: str, value: float, *, min: float | None = None, max: float | None = None) -> Knob:
        """
        A number that a person can change while the training runs: in the notebook's panel, or by `run.set_knob(name, value)`.

        `knob.value`, or `float(knob)`, is its value now. A change is made on all ranks after the same step of a prepared optimizer, and
        is kept in the run's events. Without a notebook it stays the `value` given. The same declaration again gives the same knob.
        Raises `ConfigurationError` for a value that is no finite number, or not between `min` and `max`.

        >>> lr = accelerator.knob("lr", 1e-3, min=1e-6, max=1e-1)  # doctest: +SKIP
        >>> optimizer.param_groups[0]["lr"] = lr.value  # doctest: +SKIP
        """
        return current_step_hold().declare_knob(name, value, min, max)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """
        The tracker of this name, or with `unwrap` the object underneath: wandb's run, TensorBoard's writer.

        On processes without trackers, all but the main one, it is an object on which every method does nothing.

        >>> accelerator.get_tracker("tensorboard").log_images({"first": images}, step=0)  # doctest: +SKIP
        """
        trackers = [*self.trackers, self.panel]
        for tracker in trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.trackers:
            known = ", ".join(tracker.name for tracker in trackers)
            raise ConfigurationError(
                f"{name} is not an available tracker stored inside the `Accelerator`. It has {known}. "
                "Name it in `log_with`, and call `init_trackers`."
            )
        self._warn_of_trackers_not_begun()
        return NullTracker()

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """
        Keep values by name, as those of `step`: every process's in the notebook's panel, the main process's by its trackers.

        Values are numbers, also tensors of one element on any device, or what the trackers take besides (text, dictionaries).
        `log_kwargs` holds, by the trackers' names, what else each of them is given. If a tracker raises, the others have kept
        the values all the same.

        >>> accelerator.log({"loss": loss}, step=step)  # doctest: +SKIP
        """
        if self.is_main_process and not self.trackers:
            self._warn_of_trackers_not_begun()
        self.world.when_computed(partial(self._log_now, time.time(), log_kwargs or {}), [values, step])

    def _log_now(self, now: float, more: Mapping[str, Any], logged: list[Any]) -> None:
        values, step = logged
        self.panel.log_at(now, dict(values), step)
        if not self.is_main_process:
            return
        # the panel has the values already
        with log_call(), ExitStack() as calls:
            for tracker in reversed(self.trackers):
                arguments = more.get(tracker.name, {})
                calls.callback(tracker.log, values, step=plain(step), **arguments)

    def _warn_of_trackers_not_begun(self) -> None:
        if not self.is_main_process or not self.log_with or self._has_warned_of_trackers:
            return
        self._has_warned_of_trackers = True
        names = ", ".join(str(item) if isinstance(item, str) else item.name for item in self.log_with)
        warn_user(
            f"log_with names {names}, and `init_trackers` was not called: values are shown in the notebook's panel only. "
            "Call `accelerator.init_trackers(project_name)` before the first `log`."
        )

    def _finish_trackers(self) -> None:
        """End what every tracker has begun; if one raises, the others have ended all the same."""
        running = [item for item in self.trackers if all(item is not ended for ended in self._ended_trackers)]
        self._ended_trackers = tuple(self.trackers)
        with ExitStack() as calls:
            for tracker in reversed(running):
                calls.callback(tracker.finish)
