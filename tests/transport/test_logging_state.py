"""Logging that was configured in one process holds in another: levels, filters, formats and what writes to standard streams."""

import io
import logging
import logging.handlers
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerate_nb.transport.logging_state import LoggingState, current_logging
from accelerate_nb.transport.serializer import dump, load

NAME = "accelerate_nb_test"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger that is as new afterwards."""
    made = logging.getLogger(NAME)
    yield made
    for handler in made.handlers:
        handler.close()
    forget(made)


def travelled() -> LoggingState:
    """The state of the test's loggers, as another process gets it."""
    state: LoggingState = load(dump(current_logging()))
    return LoggingState(tuple(item for item in state.loggers if item.name.startswith(NAME)))


def forget(logger: logging.Logger) -> None:
    """Have this process be the other one: the logger is as new."""
    logger.handlers.clear()
    logger.filters.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def test_levels_formats_and_filters_hold_on_the_streams_of_the_other_process(logger, monkeypatch):
    class Shout(logging.Formatter):
        def format(self, record):
            return super().format(record).upper()

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Shout("%(levelname)s %(message)s"))
    handler.addFilter(lambda record: "secret" not in record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    state = travelled()
    forget(logger)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    for _ in range(2):
        # of ranks that are threads each configures the process's
        state.install()
    logger.debug("a line")
    logger.debug("a secret")
    assert sys.stdout.getvalue() == "DEBUG A LINE\n"
    assert not logger.propagate


def test_handlers_that_two_processes_cannot_share_stay_where_they_are(logger, tmp_path: Path):
    class Locked(logging.Formatter):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    unpicklable = logging.StreamHandler(sys.stderr)
    unpicklable.setFormatter(Locked())
    for handler in (
        logging.FileHandler(tmp_path / "train.log"),
        logging.handlers.RotatingFileHandler(tmp_path / "rotated.log"),
        logging.handlers.MemoryHandler(10),
        logging.StreamHandler(io.StringIO()),
        unpicklable,
    ):
        logger.addHandler(handler)
    assert travelled().loggers[0].handlers == ()


def test_a_library_s_logger_is_configured_once_the_library_has_configured_it_itself(logger, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, NAME, logging)
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.INFO)
    child = logger.getChild("child")
    child.setLevel(logging.DEBUG)
    state = travelled()
    forget(logger)
    child.setLevel(logging.NOTSET)
    monkeypatch.delitem(sys.modules, NAME)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    source = "import logging\nlogger = logging.getLogger(__name__)\nlogger.setLevel(40)\nlogger.addHandler(logging.StreamHandler())\n"
    (tmp_path / f"{NAME}.py").write_text(source)
    state.install()
    assert logger.level == logging.NOTSET
    __import__(NAME)
    assert (logger.level, len(logger.handlers), child.level) == (logging.INFO, 1, logging.DEBUG)


def test_names_of_levels_and_what_is_disabled_hold(monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", 0)
    monkeypatch.setitem(logging._levelToName, 25, "NOTICE")
    logging.disable(logging.DEBUG)
    state = current_logging()
    logging.disable(logging.NOTSET)
    del logging._levelToName[25]
    LoggingState((), state.level_names, state.disabled_up_to).install()
    assert (logging.getLevelName(25), logging.root.manager.disable) == ("NOTICE", logging.DEBUG)
