"""Logging as the notebook configured it: levels, and what writes to its standard streams."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from accelerate_nb.rank.import_hook import after_import
from accelerate_nb.transport.serializer import dump, load

Pickled: TypeAlias = "tuple[bytes, ...]"
StreamName = Literal["stdout", "stderr"]
_LEVELS = {getattr(logging, name): name for name in ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")}
# What a handler of Python's own is made of, besides its lock and its stream.
_ATTRIBUTES = ("level", "formatter", "filters", "terminator", "_name")
# They give each of some fifty loggers a handler, in every process.
_OWN_HANDLERS = frozenset({"torch"})
# Of a console that takes the place of a stream: rich's prints to it.
_CONSOLE = "console"


@dataclass(frozen=True, slots=True)
class LoggerState:
    """A logger that was configured; `package` is the library whose import configures it, where it is a library's."""

    name: str
    level: int
    propagate: bool
    disabled: bool
    # pickled, each with the stream that it writes to, or `None` as tqdm's do; without `handlers` it has those of its own process
    handlers: tuple[tuple[Pickled, StreamName | None], ...] | None
    filters: tuple[Pickled, ...]
    package: str | None

    def install(self, _: object = None) -> None:
        """Configure this process's logger of the name; its handlers on standard streams are the notebook's, others stay."""
        logger = logging.getLogger(self.name or None)
        logger.setLevel(self.level)
        logger.propagate, logger.disabled = self.propagate, self.disabled
        for former in list(logger.handlers) if self.handlers is not None else ():
            if type(former) is logging.StreamHandler and stream_name(former.stream) is not None:
                logger.removeHandler(former)
        for pickled, stream in self.handlers or ():
            # each apart: another machine may lack the module of a formatter
            with suppress(Exception):
                handler_class, attributes = load(pickled)
                handler: logging.Handler = handler_class.__new__(handler_class)
                logging.Handler.__init__(handler)
                vars(handler).update(attributes)
                if stream is not None:
                    handler.stream = getattr(sys, stream)  # type: ignore[attr-defined]  # a `StreamHandler` has one
                logger.addHandler(handler)
        for pickled in self.filters:
            with suppress(Exception):
                logger.addFilter(load(pickled))


@dataclass(frozen=True, slots=True)
class LoggingState:
    """The configuration of logging, for processes that have their own: it holds there as environment variables do."""

    # Handlers on files, sockets and queues, and those that can't be pickled, stay where they are: two processes can't write one file.

    loggers: tuple[LoggerState, ...] = ()
    level_names: dict[int, str] = field(default_factory=dict)
    disabled_up_to: int = 0
    captures_warnings: bool = False

    def install(self) -> None:
        """Configure this process's logging; that of a library once it is imported, which configures itself then."""
        for level, name in self.level_names.items():
            logging.addLevelName(level, name)
        logging.disable(self.disabled_up_to)
        logging.captureWarnings(self.captures_warnings)
        for logger in self.loggers:
            if logger.package is None:
                logger.install()
            else:
                after_import(logger.package, logger.install)


def current_logging() -> LoggingState:
    """The configuration of this process."""
    names, loggers = logging._levelToName, []
    for name, logger in [("", logging.root), *list(logging.root.manager.loggerDict.items())]:
        if not isinstance(logger, logging.Logger):
            continue
        package = name.partition(".")[0]
        has_handlers = package not in _OWN_HANDLERS
        is_configured = logger.level != logging.NOTSET or logger.filters or logger.disabled
        if is_configured or (has_handlers and (logger.handlers or not logger.propagate)):
            loggers.append(
                LoggerState(
                    name,
                    logger.level,
                    logger.propagate,
                    logger.disabled,
                    tuple(filter(None, map(_handler, logger.handlers))) if has_handlers else None,
                    tuple(filter(None, map(_pickled, logger.filters))),
                    package if package in sys.modules and package != "__main__" else None,
                )
            )
    return LoggingState(
        loggers=tuple(loggers),
        level_names={level: name for level, name in names.items() if _LEVELS.get(level) != name},
        disabled_up_to=logging.root.manager.disable,
        captures_warnings=getattr(logging, "_warnings_showwarning", None) is not None,
    )


def stream_name(stream: Any) -> StreamName | None:
    """The standard stream that a stream is, in this process or, where a kernel has put its own there, at any earlier time."""
    name = str(getattr(stream, "name", "")).strip("<>")
    if stream in (sys.stdout, sys.__stdout__) or (name == "stdout" and hasattr(stream, "pub_thread")):
        return "stdout"
    if stream in (sys.stderr, sys.__stderr__) or (name == "stderr" and hasattr(stream, "pub_thread")):
        return "stderr"
    return None


def _handler(handler: logging.Handler) -> tuple[Pickled, StreamName | None] | None:
    """A handler's state, where it can travel."""
    stream = stream_name(getattr(handler, "stream", None))
    handler_class: type[logging.Handler]
    if type(handler).__module__ == "__main__" and not hasattr(handler, "baseFilename"):
        if stream is None and hasattr(handler, "stream"):
            return None
        handler_class = type(handler)
        attributes = {name: value for name, value in vars(handler).items() if name not in ("lock", "stream")}
    elif stream is not None or hasattr(handler, _CONSOLE):
        handler_class, stream = logging.StreamHandler, stream or "stderr"
        attributes = {name: vars(handler)[name] for name in _ATTRIBUTES if name in vars(handler)}
    else:
        return None
    pickled = _pickled((handler_class, attributes))
    return None if pickled is None else (pickled, stream)


def _pickled(value: Any) -> Pickled | None:
    try:
        return tuple(bytes(entry) for entry in dump(value))
    except Exception:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
        return None
