"""The newest complete checkpoint, from which a training can be resumed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from accelerate_nb.errors import CheckpointError
from accelerate_nb.rank.attempt_notes import leave_note, notes
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.folders import number_of, numbered, numbered_in
from accelerate_nb.runtime.checkpoints.io import atomic_commit
from accelerate_nb.runtime.checkpoints.io.atomic_commit import CheckpointPaths
from accelerate_nb.runtime.checkpoints.manifest import why_incomplete
from accelerate_nb.runtime.compat.kwargs_handlers import ProjectConfiguration
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user

_NOTE = "checkpoint"


def note_save(folder: Path) -> None:
    """Note that a checkpoint is about to be saved to this folder, for the run's next attempt."""
    leave_note(_NOTE, folder=str(folder.absolute()))


def newest_checkpoint(
    requested: str | os.PathLike[str] | None, project: ProjectConfiguration, world: World
) -> Path | None:
    """
    The newest complete checkpoint that every process has, `None` where there is none yet; all processes call it.

    `requested` is a checkpoint's folder, or one that holds checkpoints. Without it, the newest numbered one of the project
    or, where checkpoints are not numbered, the newest that this run has saved.
    """
    complete = [str(folder) for folder in _candidates(requested, project, world) if _is_complete(folder)]
    return _of_all(complete, world)


def _candidates(requested: str | os.PathLike[str] | None, project: ProjectConfiguration, world: World) -> list[Path]:
    """The folders to look at, newest first."""
    if requested is not None:
        folder = Path(requested).expanduser().absolute()
        _settle(folder, world)
        if (folder / file_names.MANIFEST_NAME).exists() or why_incomplete(folder) is None:
            return [folder]
        inside = folder.glob("[!.]*") if folder.is_dir() else ()
        return numbered(folder)[::-1] or _by_time(inside)
    if project.automatic_checkpoint_naming:
        return numbered(numbered_in(project))[::-1]
    saved = dict.fromkeys(Path(note["folder"]) for note in notes(_NOTE, former=False))
    for folder in saved:
        _settle(folder, world)
    return _by_time(saved)


def _settle(folder: Path, world: World) -> None:
    """Have a save that was killed half-way finished by one process of each machine."""
    paths = CheckpointPaths.of(folder)
    atomic_commit.settle(paths) if world.is_local_main else atomic_commit.wait_until_settled(paths)


def _by_time(folders: Iterable[Path]) -> list[Path]:
    """The folders by the time of their commit, the newest first."""
    return sorted((folder for folder in folders if folder.is_dir()), key=_committed, reverse=True)


def _committed(folder: Path) -> int:
    manifest = folder / file_names.MANIFEST_NAME
    # the list of files is written last; Accelerate writes none
    return (manifest if manifest.exists() else folder).stat().st_mtime_ns


def _is_complete(folder: Path) -> bool:
    reason = why_incomplete(folder)
    if reason is not None and (number_of(folder) is not None or (folder / file_names.MANIFEST_NAME).exists()):
        warn_user(f"{folder} is skipped, since it is not a whole checkpoint: {reason}")
    return reason is None


def _of_all(complete: list[str], world: World) -> Path | None:
    """The newest of the main process's folders that all others found complete, too."""
    if world.size == 1:
        return Path(complete[0]) if complete else None
    # a dictionary keeps the order, and is one element of what is gathered
    found: list[dict[str, None]] = gather_object(dict.fromkeys(complete))
    for folder in found[0]:
        if all(folder in others for others in found):
            return Path(folder)
    if not any(found):
        return None
    having = [rank for rank, folders in enumerate(found) if folders]
    raise CheckpointError(
        f"The newest complete checkpoint of all processes was requested, but there is none that all have; those with one are "
        f"ranks {', '.join(map(str, having))}, for example {next(iter(found[having[0]]))}. Save to a folder that all machines "
        "share, or copy a checkpoint to each of them."
    )
