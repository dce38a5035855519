"""The commit of a checkpoint's draft: it takes its final path whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from accelerate_nb.runtime.checkpoints import file_names, manifest

_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"


@dataclass(frozen=True, slots=True)
class CheckpointPaths:
    """The paths of a checkpoint: the final folder, the draft, and the former checkpoint until it is deleted."""

    folder: Path
    draft: Path
    former: Path

    @classmethod
    def of(cls, folder: Path, drafts: Path | None = None) -> CheckpointPaths:
        """The paths of a folder; its draft is in `drafts`, or beside it, or inside where it can't be exchanged as a whole."""
        folder = folder.expanduser().resolve()
        if not _can_be_exchanged(folder):
            return cls(folder, folder / _INCOMPLETE / folder.name, folder / _REPLACED)
        beside = folder.parent if drafts is None else drafts.expanduser().resolve()
        return cls(folder, beside / f".{folder.name}{_INCOMPLETE}" / folder.name, beside / f".{folder.name}{_REPLACED}")


def _can_be_exchanged(folder: Path) -> bool:
    if not folder.is_dir():
        return True
    if folder.is_mount() or Path.cwd().is_relative_to(folder) or not os.access(folder.parent, os.W_OK):
        return False
    # a folder with folders in it is a project's, and others may be at work in there
    listed = manifest.listed(folder)
    return all(path.is_file() or path.name in listed for path in folder.iterdir() if not path.name.startswith("."))


def clear(paths: CheckpointPaths) -> None:
    """Make an empty draft, after finishing a save that was killed half-way."""
    settle(paths)
    shutil.rmtree(paths.draft.parent, ignore_errors=True)
    shutil.rmtree(_aside(paths.former), ignore_errors=True)
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
        exchange(paths.former, paths.folder)
        sync(paths.folder.parent)
        _clear_former(paths)
    else:
        paths.folder.parent.mkdir(parents=True, exist_ok=True)
        paths.draft.rename(paths.folder)
        sync(paths.folder.parent)
    shutil.rmtree(paths.draft.parent, ignore_errors=True)


def settle(paths: CheckpointPaths) -> None:
    """Finish a save that was killed half-way."""
    if _ready(paths).is_dir():
        _move_in(paths)
        shutil.rmtree(paths.draft.parent, ignore_errors=True)
    if paths.former.is_dir() and not paths.folder.exists():
        paths.former.rename(paths.folder)
    elif paths.former.is_dir():
        _clear_former(paths)


def wait_until_settled(paths: CheckpointPaths) -> None:
    """Wait while another process finishes a save that was killed half-way."""
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


def sweep(left: Path) -> None:
    """Delete a draft that no process writes any more."""
    if left.name.endswith(_INCOMPLETE):
        shutil.rmtree(left, ignore_errors=True)


def exchange(path: Path, other: Path) -> None:
    """Exchange two folders: at once where the system can, else with a moment in which `other` is not there."""
    if _renames_at_once(path, other):
        return
    path.rename(_aside(path))
    other.rename(path)
    _aside(path).rename(other)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}-aside")


def _renames_at_once(path: Path, other: Path) -> bool:
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


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
