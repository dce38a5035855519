"""The folder of a checkpoint: written to as a draft, committed whole or not at all, numbered, and found again."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.rank.attempt_notes import leave_note, notes
from accelerate_nb.runtime.checkpoints import file_names, manifest
from accelerate_nb.runtime.checkpoints.writer import remove, sync
from accelerate_nb.runtime.compat.dataclasses import ProjectConfiguration
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user

_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"
_NUMBERED = re.compile(r"checkpoint_(\d+)")
_NOTE = "checkpoint"


@dataclass(frozen=True, slots=True)
class CheckpointPaths:
    """The paths of a checkpoint: the final folder, the draft, and the former checkpoint until it is deleted."""

    folder: Path
    draft: Path
    former: Path
    # whether a checkpoint that is in the folder already is an error
    is_numbered: bool = False

    @classmethod
    def of(cls, folder: Path, drafts: Path | None = None) -> CheckpointPaths:
        """The paths of a folder; its draft is in `drafts`, or beside it, or inside where it can't be exchanged as a whole."""
        folder = folder.expanduser().resolve()
        # a folder with folders in it is a project's, and others may be at work in there
        if folder.is_dir() and (
            folder.is_mount()
            or Path.cwd().is_relative_to(folder)
            or not os.access(folder.parent, os.W_OK)
            or any(
                not (path.is_file() or path.name.startswith(".") or path.name in manifest.listed(folder))
                for path in folder.iterdir()  # an error where it can't be listed; `glob` would find nothing there
            )
        ):
            return cls(folder, folder / _INCOMPLETE / folder.name, folder / _REPLACED)
        beside = folder.parent if drafts is None else drafts.expanduser().resolve()
        return cls(folder, beside / f".{folder.name}{_INCOMPLETE}" / folder.name, beside / f".{folder.name}{_REPLACED}")


def clear(paths: CheckpointPaths) -> None:
    """Make an empty draft, after finishing a save that was killed half-way; one process of all who write to it calls it."""
    if paths.is_numbered and paths.folder.exists():
        raise ConfigurationError(
            f"Checkpoint directory {paths.folder} ({number_of(paths.folder)}) already exists. Set "
            "`accelerator.project_configuration.iteration` to a number that is free."
        )
    settle(paths)
    shutil.rmtree(paths.draft.parent, ignore_errors=True)
    paths.draft.mkdir(parents=True)


def commit(paths: CheckpointPaths) -> None:
    """Make the complete draft the checkpoint; a reader meanwhile, or after a kill, finds the former one or this one."""
    sync(paths.draft)
    if paths.draft.parent.parent == paths.folder:
        # files move into a folder that has to stay; from here on the draft is complete, and `settle` finishes it if this process
        # can't
        paths.draft.rename(_ready(paths))
        _move_in(paths)
    elif paths.folder.exists():
        paths.draft.rename(paths.former)
        if not _exchange(paths.former, paths.folder):
            # for a moment there is no folder: `settle` brings the former one back
            paths.former.rename(paths.draft)
            paths.folder.rename(paths.former)
            paths.draft.rename(paths.folder)
        sync(paths.folder.parent)
        _clear_former(paths)
    else:
        paths.folder.parent.mkdir(parents=True, exist_ok=True)
        paths.draft.rename(paths.folder)
        sync(paths.folder.parent)
    shutil.rmtree(paths.draft.parent, ignore_errors=True)


def delete_draft(paths: CheckpointPaths) -> None:
    """Delete the draft of a save that failed; one that is complete stays for `settle`."""
    shutil.rmtree(paths.draft, ignore_errors=True)
    with suppress(OSError):  # the complete one is in there, or a folder that is being deleted
        paths.draft.parent.rmdir()


def settle(paths: CheckpointPaths) -> None:
    """Finish a save that was killed half-way."""
    if _ready(paths).is_dir():
        _move_in(paths)
        shutil.rmtree(paths.draft.parent, ignore_errors=True)
    if paths.former.is_dir() and not paths.folder.exists():
        paths.former.rename(paths.folder)
    elif paths.former.is_dir():
        _clear_former(paths)


def settle_once(paths: CheckpointPaths, *, here: bool) -> None:
    """Finish a save that was killed half-way in one process of each machine, `here`; the others wait for it."""
    if here:
        settle(paths)
    end = time.monotonic() + 60
    while (paths.former.is_dir() or _ready(paths).is_dir()) and time.monotonic() < end:
        time.sleep(0.02)


def discard(paths: CheckpointPaths) -> None:
    """Delete a checkpoint; a kill leaves all of it or nothing that could be taken for one."""
    deleted = paths.draft.with_name(f"{paths.folder.name}.deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    deleted.parent.mkdir(exist_ok=True)
    paths.folder.rename(deleted)
    shutil.rmtree(paths.draft.parent)


def _exchange(path: Path, other: Path) -> bool:
    """Exchange two folders at once, where the system can."""
    if sys.platform != "linux":
        return False
    # renameat2(2): flag 2 is RENAME_EXCHANGE, and -100 is AT_FDCWD
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(-100, os.fsencode(path), -100, os.fsencode(other), 2) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EPERM):  # a file system that can't, NFS for one
        return False
    raise OSError(number, os.strerror(number), str(path), None, str(other))


def _clear_former(paths: CheckpointPaths) -> None:
    """Delete the former checkpoint; files that the person kept beside it are moved beside the new one."""
    listed = manifest.listed(paths.former)
    for path in paths.former.iterdir():
        if not (path.name in listed or file_names.is_ours(path.name) or (paths.folder / path.name).exists()):
            path.rename(paths.folder / path.name)
    shutil.rmtree(paths.former)


def _ready(paths: CheckpointPaths) -> Path:
    return paths.draft.with_name(f"{paths.folder.name}.ready")


def _move_in(paths: CheckpointPaths) -> None:
    ready = _ready(paths)
    new = sorted(ready.iterdir(), key=lambda item: item.name == file_names.MANIFEST_NAME)
    stale = manifest.listed(paths.folder) | {
        path.name for path in paths.folder.iterdir() if file_names.is_ours(path.name)
    }
    if not (paths.folder / _INCOMPLETE / "begun").exists():
        for name in stale - {item.name for item in new}:
            remove(paths.folder / name)
        (paths.folder / _INCOMPLETE / "begun").touch()
    for item in new:
        if (paths.folder / item.name).is_dir():
            remove(paths.folder / item.name)
        item.replace(paths.folder / item.name)
    sync(paths.folder)


def paths_to_write(requested: str | os.PathLike[str] | None, project: ProjectConfiguration) -> CheckpointPaths:
    """The paths of the next checkpoint: by the project's numbering, else the folder that was passed."""
    if project.automatic_checkpoint_naming:
        home = numbered_in(project)
        folder = home / f"checkpoint_{project.iteration}"
        return replace(CheckpointPaths.of(folder, drafts=_drafts_of(home)), is_numbered=True)
    if requested is None:
        raise ConfigurationError(
            "save_state() was called without a folder, and checkpoints are not numbered automatically. Pass a folder, or "
            "project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    return CheckpointPaths.of(Path(requested))


def folder_to_read(requested: str | os.PathLike[str] | None, project: ProjectConfiguration, *, settles: bool) -> Path:
    """The folder of the checkpoint to load: the one passed, once a killed save is finished there, else the newest whole numbered one."""
    if requested is not None:
        paths = CheckpointPaths.of(Path(requested))
        settle_once(paths, here=settles)
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
    home = numbered_in(project)
    newest = next((folder for folder in reversed(numbered(home)) if _is_complete(folder)), None)
    if newest is None:
        raise CheckpointError(f"There is no checkpoint in {home} yet. Call save_state() first.")
    return newest


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


def prune(project: ProjectConfiguration, newest: Path) -> None:
    """Delete the numbered checkpoints that are more than the project keeps beside the newest, and what killed saves have left."""
    if not project.automatic_checkpoint_naming:
        return
    home = numbered_in(project)
    # by its number the newest may be the first, where a run begins anew
    others = [folder for folder in numbered(home) if folder.name != newest.name]
    keep = len(others) if project.total_limit is None else project.total_limit - 1
    for folder in others[: max(0, len(others) - keep)]:
        discard(CheckpointPaths.of(folder, drafts=_drafts_of(home)))
    for left in _drafts_of(home).glob(".checkpoint_*"):
        if left.name.endswith(_INCOMPLETE):  # a draft that no process writes any more
            shutil.rmtree(left, ignore_errors=True)


def numbered_in(project: ProjectConfiguration) -> Path:
    """The folder in which a project's checkpoints are numbered."""
    if project.project_dir is None:
        raise ConfigurationError(
            "automatic_checkpoint_naming=True needs a folder to number checkpoints in. Pass project_dir as well."
        )
    return Path(project.project_dir).expanduser() / "checkpoints"


def _drafts_of(home: Path) -> Path:
    """The folder for the drafts of numbered checkpoints: it is on their file system, since they are renamed."""
    # beside, where it can be: Accelerate takes whatever has a number in its name, beside the numbered ones, for a checkpoint
    is_elsewhere = home.is_dir() and home.stat().st_dev != home.parent.stat().st_dev
    return home if is_elsewhere else home.parent


def note_save(folder: Path) -> None:
    """Note that a checkpoint is about to be saved to this folder, for the run's next attempt."""
    leave_note(_NOTE, folder=str(folder.absolute()))


def newest_checkpoint(
    requested: str | os.PathLike[str] | None, project: ProjectConfiguration, world: World
) -> Path | None:
    """The newest complete checkpoint that every process has, `None` where there is none yet; all processes call it."""
    complete = [str(folder) for folder in _candidates(requested, project, world) if _is_complete(folder)]
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


def _candidates(requested: str | os.PathLike[str] | None, project: ProjectConfiguration, world: World) -> list[Path]:
    """The folders to look at, newest first: the one requested or those in it, else the project's numbered ones or this run's."""
    if requested is not None:
        folder = Path(requested).expanduser().absolute()
        settle_once(CheckpointPaths.of(folder), here=world.is_local_main)
        if (folder / file_names.MANIFEST_NAME).exists() or manifest.why_incomplete(folder) is None:
            return [folder]
        inside = folder.glob("[!.]*") if folder.is_dir() else ()
        return numbered(folder)[::-1] or _by_time(inside)
    if project.automatic_checkpoint_naming:
        return numbered(numbered_in(project))[::-1]
    saved = dict.fromkeys(Path(note["folder"]) for note in notes(_NOTE, former=False))
    for folder in saved:
        settle_once(CheckpointPaths.of(folder), here=world.is_local_main)
    return _by_time(saved)


def _by_time(folders: Iterable[Path]) -> list[Path]:
    """The folders by the time of their commit, the newest first."""

    def committed(folder: Path) -> int:
        listed = folder / file_names.MANIFEST_NAME
        # the list of files is written last; Accelerate writes none
        return (listed if listed.exists() else folder).stat().st_mtime_ns

    return sorted((folder for folder in folders if folder.is_dir()), key=committed, reverse=True)


def _is_complete(folder: Path) -> bool:
    reason = manifest.why_incomplete(folder)
    if reason is not None and (number_of(folder) is not None or (folder / file_names.MANIFEST_NAME).exists()):
        warn_user(f"{folder} is skipped, since it is not a whole checkpoint: {reason}")
    return reason is None
