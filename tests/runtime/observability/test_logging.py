"""Log lines come from the process that should write them, as from Hugging Face Accelerate's loggers."""

import io
import logging
import os
import re
import sys
import time
from typing import Any

import pytest

from accelerate_nb import PartialState
from accelerate_nb.logging import get_logger
from accelerate_nb.utils import gather_object
from tests.peers import Peer, under_both
from tests.ranks import run_on_ranks

# Python 3.10 counts the frames of `logging` itself where it looks for the caller.
COUNTS_CALLERS_ONLY = sys.version_info >= (3, 11)


def lines(peer: Peer) -> list[Any]:
    """What several calls write, and what the levels are afterwards."""
    get = peer.door("logging").get_logger
    early = get("early")
    try:
        early.info("nobody is there")
        raised = ""
    except RuntimeError as error:
        raised = str(error).partition("utility")[0]
    accelerator = peer.Accelerator()
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(funcName)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logger = get("one", log_level="info")
    logger.debug("too little")
    logger.info("from the main process: %d", 3)
    logger.info("from all", main_process_only=False)
    logger.warning("in turn", in_order=True)
    logger.error("in turn, and from the main process", in_order=True, main_process_only=True)
    logger.log(logging.CRITICAL, "a level")
    for _ in range(2):
        logger.warning_once("only once")
        logger.warning_once("only once from each", main_process_only=False)
    logger.warning_once("another")
    try:
        raise KeyError("trouble")
    except KeyError:
        logger.exception("it went wrong")
    os.environ["ACCELERATE_LOG_LEVEL"] = "error"
    by_environment = get("two")
    by_environment.warning("too little", main_process_only=False)
    del os.environ["ACCELERATE_LOG_LEVEL"]
    accelerator.wait_for_everyone()
    text = re.sub(r'File ".*", line \d+', "File", written.getvalue())
    text = text.replace(" warning_once [", " lines [")  # Accelerate says that its own method has written the line
    levels = [item.level for item in (logging.getLogger("one"), by_environment.logger)]
    return [raised, [line for line in text.splitlines() if "^" not in line], levels]


def test_lines_and_levels_are_accelerates() -> None:
    both = under_both(lines, 2)
    assert both.ours == both.theirs
    assert "INFO one lines [RANK 1] from all" in both.ours[1][1]
    assert both.ours[0][0].startswith("You must initialize the accelerate state")


def test_a_level_is_the_loggers_own_and_a_line_names_its_place(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    before = logging.getLogger().level
    logger = get_logger("placed", log_level="info")
    assert (logger.logger.level, logging.getLogger().level) == (logging.INFO, before)

    def helper() -> None:
        logger.info("mine")
        logger.info("my caller's", stacklevel=3)
        logger.warning_once("mine")

    helper()
    caller = "test_a_level_is_the_loggers_own_and_a_line_names_its_place" if COUNTS_CALLERS_ONLY else "helper"
    assert [record.funcName for record in caplog.records] == ["helper", caller, "helper"]


class Wrapped(logging.LoggerAdapter):  # Python 3.10's takes no type
    """A logger of somebody's own around ours, which says how far its caller is."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        self.logger.log(level, msg, *args, **{**kwargs, "stacklevel": 3})


def around(peer: Peer) -> list[str]:
    """Which functions are said to have written lines, with `stacklevel` and through a logger around the logger."""
    peer.PartialState(cpu=True)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.funcName)  # type: ignore[method-assign]
    logger = peer.door("logging").get_logger("around", log_level="info")
    logger.logger.addHandler(handler)

    def helper() -> None:
        Wrapped(logger, {}).info("through")
        for level in (2, 3):
            logger.info("straight", stacklevel=level)
            logger.info("in order", stacklevel=level, in_order=True)

    helper()
    return seen


def test_a_logger_around_ours_counts_as_around_accelerates() -> None:
    both = under_both(around, 1)
    third = "around" if COUNTS_CALLERS_ONLY else "helper"
    assert both.ours == both.theirs == [["helper", "helper", "helper", third, third]]


def in_turn(rounds: int) -> list[int]:
    state = PartialState(cpu=True)
    moments: list[int] = []
    handler = logging.Handler()
    # of the machine, so that all its processes read the same clock
    handler.emit = lambda _: moments.append(time.monotonic_ns())  # type: ignore[method-assign]
    logger = get_logger("turns", log_level="info")
    logger.logger.addHandler(handler)
    for _ in range(rounds):
        logger.info("mine", in_order=True)
    assert state.num_processes == 2
    times: list[int] = gather_object([moments])
    return [rank for _, rank in sorted((when, rank) for rank, mine in enumerate(times) for when in mine)]


def test_lines_in_order_come_in_the_order_of_ranks() -> None:
    assert run_on_ranks(in_turn, 2, 5) == [[0, 1] * 5] * 2


def bars(peer: Peer) -> list[bool]:
    state = peer.PartialState(cpu=True)
    tqdm = peer.door("utils").tqdm
    everywhere, disabled = {"main_process_only": False}, {"disable": True}
    found = [tqdm(range(2), **given).disable for given in ({}, everywhere, disabled, everywhere | disabled)]
    with pytest.raises(ValueError, match="main_process_only"):
        tqdm(True, range(2))
    return [*found, state.is_local_main_process, list(tqdm(range(2))) == [0, 1]]


@pytest.mark.slow
def test_a_progress_bar_is_shown_where_accelerate_shows_it() -> None:
    both = under_both(bars, 2)
    assert both.ours == both.theirs == [[False, False, True, True, True, True], [True, False, True, True, False, True]]
