"""Which folder a checkpoint goes to, or is read from."""

from __future__ import annotations

import os
import re
from pathlib import Path

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.notices import notice
from accelerate_nb.runtime.checkpoints import committing
from accelerate_nb.runtime.checkpoints.committing import Place
from accelerate_nb.runtime.checkpoints.manifest import why_incomplete
from accelerate_nb.runtime.handlers import ProjectConfiguration

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def place_to_write(asked: str | os.PathLike[str] | None, project: ProjectConfiguration) -> Place:
    """Where the next checkpoint goes: where the project's numbering says, else where the person says."""
    if project.automatic_checkpoint_naming:
        folder = _numbered_in(project) / f"checkpoint_{project.iteration}"
        if folder.exists():
            raise ConfigurationError(
                f"Checkpoint directory {folder} ({project.iteration}) already exists. Set "
                "`accelerator.project_configuration.iteration` to a number that is free."
            )
        # Accelerate takes whatever has a number in its name, and lies among the numbered ones, for a checkpoint
        return Place.of(folder, drafts=folder.parent.parent)
    if asked is None:
        raise ConfigurationError(
            "save_state() was called without a folder, and checkpoints are not numbered automatically. Pass a folder, or "
            "project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    return Place.of(Path(asked))


def folder_to_read(asked: str | os.PathLike[str] | None, project: ProjectConfiguration, *, settles: bool) -> Path:
    """
    Where the checkpoint lies that is to be loaded: where the person says, else the newest of the numbered ones that is whole.

    With `settles`, what a killed save has left half-way is brought to its end before.
    """
    if asked is not None:
        place = Place.of(Path(asked))
        committing.settle(place) if settles else committing.wait_until_settled(place)
        folder = Path(asked).expanduser()
        if folder.is_dir():
            return folder
        if place.former.is_dir():
            return place.former  # the process died between two renames: the former checkpoint is still whole
        raise ConfigurationError(
            f"Tried to find {folder} but folder does not exist. Pass a folder that save_state wrote."
        )
    if not project.automatic_checkpoint_naming:
        raise ConfigurationError(
            "No input_dir provided and automatic checkpoint naming is disabled. Pass the folder that save_state wrote."
        )
    return _newest(_numbered_in(project))


def _newest(folder: Path) -> Path:
    for each in reversed(numbered(folder)):
        reason = why_incomplete(each)
        if reason is None:
            return each
        notice(f"{each} is passed over, since it is not a whole checkpoint: {reason}")
    raise CheckpointError(f"There is no checkpoint in {folder} yet. Call save_state() first.")


def numbered(folder: Path) -> list[Path]:
    """The numbered checkpoints of a folder, oldest first; whatever else lies there is left alone."""
    if not folder.is_dir():
        return []
    found = [(number, each) for each in folder.iterdir() if (number := number_of(each)) is not None]
    return [each for _, each in sorted(found)]


def number_of(folder: Path) -> int | None:
    """The number in the name of a checkpoint that was named automatically."""
    match = _NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else None


def prune(project: ProjectConfiguration) -> None:
    """Delete the oldest numbered checkpoints that are more than the project keeps, and what killed saves have left."""
    if not project.automatic_checkpoint_naming:
        return
    home = _numbered_in(project)
    existing = numbered(home)
    keep = len(existing) if project.total_limit is None else project.total_limit
    for folder in existing[: max(0, len(existing) - keep)]:
        committing.discard(Place.of(folder, drafts=home.parent))
    for left in home.parent.glob(".checkpoint_*"):
        committing.sweep(left)


def _numbered_in(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ConfigurationError(
            "automatic_checkpoint_naming=True needs a place to number checkpoints in. Pass project_dir as well."
        )
    return Path(project.project_dir).expanduser() / "checkpoints"
