"""Every exception that this package raises on purpose, as one tree."""

from __future__ import annotations

import os
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from accelerate_nb.events.model import Failure

Raised = TypeVar("Raised", bound=BaseException)

_OUR_OWN = os.path.dirname(__file__)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    inner = _without_our_frames(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_OUR_OWN):
        return inner
    return TracebackType(inner, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


class AccelerateNbError(Exception):
    """
    The root: `except AccelerateNbError` catches whatever this package raises on purpose.

    A notebook shows the frames of the person's own code, and none of this package's.
    """

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception for the lines to show (`InteractiveShell.showtraceback`)
        from IPython.core.interactiveshell import InteractiveShell

        trace = _without_our_frames(self.__traceback__)
        shown: list[str] = InteractiveShell.instance().InteractiveTB.structured_traceback(type(self), self, trace)
        return shown


def of_this_package(error: Raised) -> Raised:
    """Let a notebook show an error of Python's own as it shows this package's: without the package's frames."""
    error._render_traceback_ = MethodType(AccelerateNbError._render_traceback_, error)  # type: ignore[attr-defined]
    return error


class ConfigurationError(AccelerateNbError, ValueError):
    """A setting was given a value that it can't have."""


class NotYetError(AccelerateNbError, NotImplementedError):
    """Something that Accelerate offers was asked for and is not offered here yet."""


class IncompleteTrackerError(AccelerateNbError, NotImplementedError):
    """A class of trackers lacks something that every tracker has to say of itself."""


class MissingExtraError(AccelerateNbError, ImportError):
    """An optional package is needed and is not installed."""


class StateError(AccelerateNbError, RuntimeError):
    """An object of the runtime was used before, or after, the time at which it can be used."""


class OperationError(AccelerateNbError, RuntimeError):
    """
    A collective operation was called with values that don't fit together.

    `calls` holds what each process called, in the order of ranks, where their calls differed.
    """

    calls: tuple[str, ...] = ()


class DataError(OperationError, TypeError, ValueError):
    """An operation on nested tensors met something that it can't work on."""


class CheckpointError(AccelerateNbError, RuntimeError):
    """A checkpoint could not be written, found or read."""


class ExportError(AccelerateNbError, ValueError):
    """
    A notebook can't be written as a script: it is no notebook, or cells of it mean nothing outside of one.

    The message names every such cell and line, so that all can be mended at once.
    """


class ScriptError(AccelerateNbError, RuntimeError):
    """A line that a script runs once on each machine failed in the process that ran it."""


class LaunchError(AccelerateNbError, RuntimeError):
    """The workers could not be started as they were asked for."""


class PayloadError(LaunchError, TypeError):
    """The function, or something that it captures, can't travel to another process."""


class NeedsForkError(PayloadError):
    """Something among the arguments can only be inherited by a process that is forked from this one."""


class WorkerError(AccelerateNbError, RuntimeError):
    """
    A worker failed.

    `rank` is the rank whose failure came first as a cause, `failures` holds one `Failure` for every rank that failed, in
    the order of their ranks, and `folder` is the run's folder. Where the worker raised an exception, the error raised in
    the notebook is an instance of that exception's class as well, so `except KeyError` catches it.
    """

    rank: int = -1
    failures: tuple[Failure, ...] = ()
    folder: str | None = None
    message: str = ""

    def __str__(self) -> str:
        return self.message or super().__str__()


class HangError(WorkerError, TimeoutError):
    """The run took longer than its `timeout`; the message holds every rank's stack."""


class StoppedError(WorkerError, KeyboardInterrupt):
    """The run was stopped because somebody asked for it, before its function had returned on every rank."""


class StopRequested(KeyboardInterrupt):
    """
    Somebody asked the run to stop, and every rank has made the same last step: it is raised there, in each of them.

    Whatever saves on an interrupt does so here, on all ranks alike; `Accelerator.stop_requested` does without it.
    """
