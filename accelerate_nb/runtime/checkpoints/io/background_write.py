"""A save that goes on while the training does."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from accelerate_nb.errors import CheckpointError
from accelerate_nb.rank import background_tasks


class BackgroundWrite:
    """
    One checkpoint on its way to the disk, written by a thread.

    A launched function has not finished before it, and a program that ends waits for it: the thread is not a daemon. A
    failure that was not raised by then is printed on stderr.
    """

    def __init__(self, folder: Path, work: Callable[[], None]) -> None:
        self.folder = folder
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="accelerate_nb checkpoint writer", daemon=False)
        atexit.register(self._print_failure)
        background_tasks.begun(self.wait)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is in its folder; a `CheckpointError` names the reason why it is not."""
        self._thread.join()
        atexit.unregister(self._print_failure)
        background_tasks.done(self.wait)
        if self._error is not None:
            raise CheckpointError(
                f"The checkpoint that was written in the background did not come about: {self._error} "
                "The former one is unchanged. Save again, or with blocking=True."
            ) from self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised in `wait`
            self._error = error

    def _print_failure(self) -> None:
        self._thread.join()
        if self._error is not None:
            sys.stderr.write(f"The checkpoint {self.folder} was not written: {self._error}\n")
