"""The trackers of a run: those that `log_with` names, as far as they are installed."""

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from accelerate_nb.errors import ConfigurationError, MissingExtraError
from accelerate_nb.runtime.compat.dataclasses import LoggerType
from accelerate_nb.runtime.trackers.aim import AimTracker
from accelerate_nb.runtime.trackers.base import GeneralTracker
from accelerate_nb.runtime.trackers.clearml import ClearMLTracker
from accelerate_nb.runtime.trackers.comet import CometMLTracker
from accelerate_nb.runtime.trackers.dvclive import DVCLiveTracker
from accelerate_nb.runtime.trackers.mlflow import MLflowTracker
from accelerate_nb.runtime.trackers.swanlab import SwanLabTracker
from accelerate_nb.runtime.trackers.tensorboard import TensorBoardTracker
from accelerate_nb.runtime.trackers.trackio import TrackioTracker
from accelerate_nb.runtime.trackers.wandb import WandBTracker
from accelerate_nb.user_warnings import warn_user

Wanted: TypeAlias = str | LoggerType | GeneralTracker
LoggingDir: TypeAlias = str | os.PathLike[str] | None


class TrackerRegistry(dict[str, type[Any]]):
    """Tracker classes by the names that `log_with` takes."""


# In the order in which "all" takes them. Public, and added to: Hugging Face's contract for trackers of one's own.
LOGGER_TYPE_TO_CLASS = TrackerRegistry(
    (tracker.name, tracker)
    for tracker in (
        TensorBoardTracker,
        WandBTracker,
        CometMLTracker,
        AimTracker,
        MLflowTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
        TrackioTracker,
    )
)


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """
    Let `log_with` know a class of one's own by its `name`, in this process and before the `Accelerator` is made.

    The class is called with the project's name, then with the folder for logs if it `requires_logging_directory`, then with its part
    of `init_kwargs`. One of the same name is replaced, with a warning. In a function that is launched, call this inside the function.
    """
    given: Any = tracker_class
    if not (isinstance(given, type) and issubclass(given, GeneralTracker)):
        raise ConfigurationError(
            f"{tracker_class!r} can't be a tracker: it is no subclass of `GeneralTracker`. Derive the class from it."
        )
    name = getattr(tracker_class, "name", None)
    if not name:
        raise ConfigurationError(
            f"{tracker_class.__name__} has no `name`. Define one in the class: `log_with` takes it."
        )
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ConfigurationError(
            f"{tracker_class.__name__} has no `requires_logging_directory`. Define it in the class: true if it is to be "
            "given the folder for logs after the project's name, false otherwise."
        )
    if (former := LOGGER_TYPE_TO_CLASS.get(name)) is not None:
        warn_user(f"{tracker_class.__name__} replaces {former.__name__} as the tracker {name!r}.")
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """The trackers of this package whose own packages are installed."""
    known = [name for name in LOGGER_TYPE_TO_CLASS if name in LoggerType]
    return [LoggerType(name) for name in known if LOGGER_TYPE_TO_CLASS[name]._is_available()]


def filter_trackers(log_with: Any, logging_dir: LoggingDir = None) -> list[Any]:
    """
    The trackers to be used, each once: a `LoggerType`, the name of a registered class, or a tracker of one's own.

    `log_with` is one of these, a list of them, or `None`; `"all"` stands for all that are installed and have a folder to write
    to. `ConfigurationError` is raised for an unknown name and for a tracker that needs `logging_dir` where there is none,
    `MissingExtraError` for one that is requested by name and is not installed.
    """
    if log_with is None:
        return []
    wanted = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    if any(isinstance(item, str) and item == LoggerType.ALL.value for item in wanted):
        available = get_available_trackers()
        without_folder = [] if logging_dir is not None else [item for item in available if _needs_folder(item)]
        if without_folder:
            warn_user(
                f"log_with='all' leaves out {', '.join(without_folder)}: there is no folder to write to. Pass `project_dir`."
            )
        own = [item for item in wanted if isinstance(item, GeneralTracker)]
        wanted = [*own, *(item for item in available if item not in without_folder)]
    found = [item if isinstance(item, GeneralTracker) else _named(item, logging_dir) for item in wanted]
    # a tracker of one's own may define equality as it likes
    return list({item if isinstance(item, str) else id(item): item for item in found}.values())


def _named(requested: Any, logging_dir: LoggingDir) -> str:
    name = str(requested) if isinstance(requested, str) else ""
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ConfigurationError(
            f"Unsupported logging capability: log_with={requested!r}. Known ones are {', '.join(['all', *LOGGER_TYPE_TO_CLASS])}; "
            "a tracker of your own is given as an instance, or registered in this process with `register_tracker_class`."
        )
    tracker_type = LoggerType(name) if name in LoggerType else name
    if not LOGGER_TYPE_TO_CLASS[name]._is_available():
        extra = name.replace("_", "-")
        raise MissingExtraError(
            f"log_with={name!r} needs a package that is not installed here. Install it: pip install 'accelerate-nb[{extra}]'"
        )
    if logging_dir is None and _needs_folder(tracker_type):
        raise ConfigurationError(
            f"Logging with `{name}` requires a `logging_dir`, and there is none. "
            "Pass `project_dir` to the Accelerator, or `logging_dir` in its `project_config`."
        )
    return tracker_type


def _needs_folder(tracker_type: str) -> bool:
    return bool(LOGGER_TYPE_TO_CLASS[str(tracker_type)].requires_logging_directory)


def made(wanted: Wanted, project_name: str, logging_dir: LoggingDir, init_kwargs: Mapping[str, Any]) -> GeneralTracker:
    """The tracker, of the project's name and with its own part of `init_kwargs`; one that was given is itself."""
    if isinstance(wanted, GeneralTracker):
        return wanted
    folder = (logging_dir,) if _needs_folder(wanted) else ()
    tracker: GeneralTracker = LOGGER_TYPE_TO_CLASS[str(wanted)](
        project_name, *folder, **init_kwargs.get(str(wanted), {})
    )
    return tracker
