"""Log lines that know which process writes them."""

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.world.registry import current_world, is_known, reconnect

# As Accelerate counts: the caller of `log` is recorded as the writer, unless `stacklevel` is passed.
_CALLER_OF_LOG = 2


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10's own adapter takes no type
    """
    A logger whose lines begin with the rank, and come from the main process by default.

    `main_process_only=False` lets every process write, `in_order=True` one after the other. `stacklevel` counts this adapter
    too, as Accelerate's does: 2 is the position of the call, 3 that of its caller.
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, Any] | None = None) -> None:
        super().__init__(logger, extra or {})
        self._logged: set[tuple[Any, ...]] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The line with its rank; the caller's position in the file is kept."""
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", _CALLER_OF_LOG)
        return f"[RANK {current_world().rank}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Write a line, if it is this process's to write."""
        if not is_known():
            raise StateError(
                "You must initialize the accelerate state by calling either `PartialState()` or `Accelerator()` before "
                "using the logging utility: the rank of a line is not known before that."
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]  # a dictionary comes back as one
        world = current_world()
        if not in_order:
            if world.is_main or not main_process_only:
                self.logger.log(level, msg, *args, **kwargs)
            return
        reconnect()
        for rank in range(world.size):
            if rank == world.rank:
                self.logger.log(level, msg, *args, **kwargs)
            world.barrier()

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """A warning that is written the first time only."""
        key = (args, tuple(sorted(kwargs.items())))
        if key not in self._logged:
            self._logged.add(key)
            self.log(logging.WARNING, *args, **{"stacklevel": _CALLER_OF_LOG + 1, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """
    A logger for `name` that knows its process; the level comes from `log_level` or from `ACCELERATE_LOG_LEVEL`.

    >>> logger = get_logger(__name__)
    >>> logger.info("one line from the main process")  # doctest: +SKIP
    """
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
    return MultiProcessAdapter(logger)
