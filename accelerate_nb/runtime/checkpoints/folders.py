"""The folder that a checkpoint is written to, or read from."""

from __future__ import annotations

import os
import re
from pathlib import Path

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints.io import atomic_commit
from accelerate_nb.runtime.checkpoints.io.atomic_commit import CheckpointPaths
from accelerate_nb.runtime.checkpoints.manifest import why_incomplete
from accelerate_nb.runtime.compat.kwargs_handlers import ProjectConfiguration
from accelerate_nb.user_warnings import warn_user

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def paths_to_write(requested: str | os.PathLike[str] | None, project: ProjectConfiguration) -> CheckpointPaths:
    """The paths of the next checkpoint: by the project's numbering, else the folder that was passed."""
    if project.automatic_checkpoint_naming:
        folder = numbered_in(project) / f"checkpoint_{project.iteration}"
        if folder.exists():
            raise ConfigurationError(
                f"Checkpoint directory {folder} ({project.iteration}) already exists. Set "
                "`accelerator.project_configuration.iteration` to a number that is free."
            )
        # Accelerate takes whatever has a number in its name, beside the numbered ones, for a checkpoint
        return CheckpointPaths.of(folder, drafts=folder.parent.parent)
    if requested is None:
        raise ConfigurationError(
            "save_state() was called without a folder, and checkpoints are not numbered automatically. Pass a folder, or "
            "project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    return CheckpointPaths.of(Path(requested))


def folder_to_read(requested: str | os.PathLike[str] | None, project: ProjectConfiguration, *, settles: bool) -> Path:
    """
    The folder of the checkpoint to load: the one that was passed, else the newest of the numbered ones that is whole.

    With `settles`, a save that was killed half-way is finished before.
    """
    if requested is not None:
        paths = CheckpointPaths.of(Path(requested))
        atomic_commit.settle(paths) if settles else atomic_commit.wait_until_settled(paths)
        folder = Path(requested).expanduser()
        if folder.is_dir():
            return folder
        if paths.former.is_dir():
            return paths.former  # the process died between two renames: the former checkpoint is still whole
        raise ConfigurationError(
            f"Tried to find {folder} but folder does not exist. Pass a folder that save_state wrote."
        )
    if not project.automatic_checkpoint_naming:
        raise ConfigurationError(
            "No input_dir provided and automatic checkpoint naming is disabled. Pass the folder that save_state wrote."
        )
    return _newest(numbered_in(project))


def _newest(folder: Path) -> Path:
    for item in reversed(numbered(folder)):
        reason = why_incomplete(item)
        if reason is None:
            return item
        warn_user(f"{item} is skipped, since it is not a whole checkpoint: {reason}")
    raise CheckpointError(f"There is no checkpoint in {folder} yet. Call save_state() first.")


def numbered(folder: Path) -> list[Path]:
    """The numbered checkpoints of a folder, oldest first; other files are left alone."""
    if not folder.is_dir():
        return []
    found = [(number, path) for path in folder.iterdir() if (number := number_of(path)) is not None]
    return [item for _, item in sorted(found)]


def number_of(folder: Path) -> int | None:
    """The number in the name of a checkpoint that was named automatically."""
    match = _NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else None


def prune(project: ProjectConfiguration) -> None:
    """Delete the oldest numbered checkpoints that are more than the project keeps, and what killed saves have left."""
    if not project.automatic_checkpoint_naming:
        return
    home = numbered_in(project)
    existing = numbered(home)
    keep = len(existing) if project.total_limit is None else project.total_limit
    for folder in existing[: max(0, len(existing) - keep)]:
        atomic_commit.discard(CheckpointPaths.of(folder, drafts=home.parent))
    for left in home.parent.glob(".checkpoint_*"):
        atomic_commit.sweep(left)


def numbered_in(project: ProjectConfiguration) -> Path:
    """The folder in which a project's checkpoints are numbered."""
    if project.project_dir is None:
        raise ConfigurationError(
            "automatic_checkpoint_naming=True needs a folder to number checkpoints in. Pass project_dir as well."
        )
    return Path(project.project_dir).expanduser() / "checkpoints"
