"""Every exception that this package raises on purpose, as one tree."""

from __future__ import annotations

import os
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from accelerate_nb.events.event_types import Failure, Hang

Raised = TypeVar("Raised", bound=BaseException)

_PACKAGE = os.path.dirname(__file__)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    inner = _without_our_frames(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return inner
    return TracebackType(inner, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def titled(shell: Any, name: str, text: str) -> str:
    """An error's name and message, coloured as IPython's shell colours its own."""
    return f"{name}: {text}" if str(shell.colors).lower() == "nocolor" else f"\x1b[31m{name}\x1b[39m: {text}"


class AccelerateNbError(Exception):
    """
    The root: `except AccelerateNbError` catches whatever this package raises on purpose.

    A notebook shows the frames of the person's own code, and none of this package's.
    """

    def _render_traceback_(self) -> list[str]:
        # IPython gets the lines to show from the exception (`InteractiveShell.showtraceback`)
        from IPython.core.interactiveshell import InteractiveShell

        trace = _without_our_frames(self.__traceback__)
        shown: list[str] = InteractiveShell.instance().InteractiveTB.structured_traceback(type(self), self, trace)
        return shown


def of_this_package(error: Raised) -> Raised:
    """Have a notebook show an error of Python's own as it shows this package's: without the package's frames."""
    error._render_traceback_ = MethodType(AccelerateNbError._render_traceback_, error)  # type: ignore[attr-defined]
    return error


def relink(
    error: BaseException, cause: BaseException | None, context: BaseException | None, suppress_context: bool
) -> None:
    """Set what led to an exception."""
    # its class may be a frozen dataclass, which refuses plain assignment; and to set a cause suppresses the context
    for name, value in (("__cause__", cause), ("__context__", context), ("__suppress_context__", suppress_context)):
        object.__setattr__(error, name, value)


class ConfigurationError(AccelerateNbError, ValueError):
    """A setting was given a value that it can't have."""


class UnknownSettingError(ConfigurationError, TypeError):
    """A setting was named that there is not; a notebook shows the message alone, as the cell shows the rest."""

    def _render_traceback_(self) -> list[str]:
        from IPython.core.interactiveshell import InteractiveShell

        formatter: Any = InteractiveShell.instance().InteractiveTB
        shown: list[str] = formatter.get_exception_only(type(self), self)
        return shown


class NotYetError(AccelerateNbError, NotImplementedError):
    """Something that Accelerate offers was requested, and this package does not offer it yet."""


class IncompleteTrackerError(AccelerateNbError, NotImplementedError):
    """A tracker class lacks an attribute that every tracker has to define."""


class MissingExtraError(AccelerateNbError, ImportError):
    """An optional package is needed and is not installed."""


class StateError(AccelerateNbError, RuntimeError):
    """An object of the runtime was used before, or after, the time at which it can be used."""


class NotConfiguredError(StateError, NotImplementedError):
    """A way to split a model was asked about that this run doesn't use, and that Accelerate never offers."""


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
    """The workers could not be started as requested."""


class ProtocolError(AccelerateNbError, ValueError):
    """A message from another process was refused; `refusal` is the reason in one word, the text says more."""

    def __init__(self, refusal: str, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


class PayloadError(LaunchError, TypeError):
    """The function, or something that it captures, can't travel to another process."""


class NeedsForkError(PayloadError):
    """Something among the arguments can only be inherited by a process that is forked from this one."""


class UnpicklableError(AccelerateNbError):
    """Stands in for an exception of a worker that can't be brought to the notebook; the message has its type, its text and the reason."""


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
    # where a page shows all of it in the run's panel: what stands in the line under that, an empty text or more
    _under_panel: str | None = None

    def __str__(self) -> str:
        return self.message or super().__str__()

    def _render_traceback_(self) -> list[str]:
        # `%tb` gets all of it
        if (line := self.line_under_panel()) is not None:
            return line
        # the message has the causes already
        cause, context, suppress_context = self.__cause__, self.__context__, self.__suppress_context__
        relink(self, None, None, suppress_context=True)
        try:
            return super()._render_traceback_()
        finally:
            relink(self, cause, context, suppress_context)

    def line_under_panel(self) -> list[str] | None:
        """The one line that a notebook shows first where the run's panel has the rest, once; otherwise `None`."""
        if (more := self._under_panel) is None:
            return None
        from IPython.core.interactiveshell import InteractiveShell

        object.__setattr__(self, "_under_panel", None)
        text = (
            f"{str(self).partition(chr(10))[0]} (the run's panel has the traceback, %tb shows it here) {more}".rstrip()
        )
        return [titled(InteractiveShell.instance(), type(self).__name__, text)]


def mark_in_panel(error: BaseException, more: str = "") -> None:
    """Have a notebook show one line of a run's error the next time, and `more`: a page shows the rest in the run's panel."""
    if isinstance(error, WorkerError):
        # the worker's class may be a frozen dataclass, which refuses plain assignment
        object.__setattr__(error, "_under_panel", more)


class HangError(WorkerError, TimeoutError):
    """
    The run took longer than its `timeout`, or its ranks waited for one that had returned.

    The message holds every rank's stack, `hang` holds where the ranks were.
    """

    hang: Hang | None = None


class StoppedError(WorkerError, KeyboardInterrupt):
    """The run was stopped because somebody asked for it, before its function had returned on every rank."""

    def _render_traceback_(self) -> list[str]:
        """The message alone for IPython: a person who pressed Stop needs no traceback."""
        return [" ".join(str(self).split())]


class StopRequested(KeyboardInterrupt):
    """
    Somebody asked the run to stop, and every rank has made the same last step: it is raised there, in each of them.

    Whatever saves on an interrupt does so here, on all ranks alike; `Accelerator.stop_requested` does without it.
    """
