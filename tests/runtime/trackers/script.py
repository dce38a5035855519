"""The training that every tracker's test keeps a record of, under both packages."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.runtime.compat.packages import is_installed
from tests.peers import Peer, under_both

SETTINGS = {"lr": 0.1, "layers": 3, "name": "digits", "augment": True}
VALUES = [{"loss": 1 / (step + 1), "train_accuracy": step} for step in range(3)]
# What is to be read of them again: name to pairs of step and value.
COURSES = {name: [(step, values[name]) for step, values in enumerate(VALUES)] for name in ("loss", "train_accuracy")}


def needs(module: str) -> pytest.MarkDecorator:
    """A test that is skipped where a package is missing; the package is not imported, which some can't without a trace."""
    return pytest.mark.skipif(not is_installed(module), reason=f"{module} is not installed")


def train(
    peer: Peer,
    tracker: str,
    folder: str,
    init_kwargs: dict[str, Any] | None = None,
    more: Callable[[Any], None] | None = None,
) -> int:
    """Log `VALUES` with a tracker that keeps them below `folder`, in a place of the package's own; `more` logs more."""
    peer_folder = Path(folder, peer.name)
    peer_folder.mkdir(exist_ok=True)
    os.chdir(peer_folder)
    os.environ.update(
        WANDB_DIR=str(peer_folder),
        TRACKIO_DIR=str(peer_folder / "trackio"),
        COMET_OFFLINE_DIRECTORY=str(peer_folder / "comet"),
        CLEARML_CACHE_DIR=str(peer_folder / "clearml"),
        MLFLOW_TRACKING_URI=(peer_folder / "mlruns").as_uri(),
    )
    accelerator = peer.Accelerator(log_with=tracker, project_dir=str(peer_folder))
    accelerator.init_trackers("digits", dict(SETTINGS), init_kwargs)
    for step, values in enumerate(VALUES):
        accelerator.log(dict(values), step=step)
    if more is not None:
        more(accelerator)
    # with Accelerate a rank that ends first would take the group from one that still connects
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return len(accelerator.trackers)


def records(
    tracker: str,
    folder: Path,
    read: Callable[[Path], Any],
    init_kwargs: dict[str, Any] | None = None,
    more: Callable[[Any], None] | None = None,
) -> tuple[Any, Any]:
    """What `read` finds in the places of Accelerate's and of our training on two processes, of which the first keeps a record."""
    both = under_both(train, 2, tracker, str(folder), init_kwargs, more)
    assert both.theirs == both.ours == [1, 0]
    return read(folder / "accelerate"), read(folder / "accelerate_nb")
