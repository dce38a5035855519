"""Processes of this package that take for ever to start: nothing in them has begun while they are held."""

from pathlib import Path

# Python imports it before anything else, in the processes that fork workers or are workers.
HELD = """
import os, sys, time
if {{"accelerate_nb.supervisor.main", "accelerate_nb.worker.main"}} & set(sys.orig_argv):
    open({folder!r} + "/starts", "a").close()
    while os.path.exists({folder!r} + "/held"):
        time.sleep(0.01)
"""


class Cold:
    """A folder to be put on `PYTHONPATH`: what starts with it there waits until it is released."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "held").touch()
        (folder / "sitecustomize.py").write_text(HELD.format(folder=str(folder)))

    @property
    def starts(self) -> bool:
        """Whether a process has started, and waits."""
        return (self.folder / "starts").exists()

    def release(self) -> None:
        """Let them go on."""
        (self.folder / "held").unlink(missing_ok=True)
