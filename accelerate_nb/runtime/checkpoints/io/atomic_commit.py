"""How a draft of a checkpoint comes to its place whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from accelerate_nb.runtime.checkpoints import manifest, names

_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint will be seen, where it is drafted, and where the former one waits to be cleared away."""

    folder: Path
    draft: Path
    former: Path

    @classmethod
    def of(cls, folder: Path, drafts: Path | None = None) -> Place:
        """The place of a folder; its draft lies in `drafts`, or beside it, or inside where it can't be exchanged as a whole."""
        folder = folder.expanduser().resolve()
        if not _can_be_exchanged(folder):
            return cls(folder, folder / _INCOMPLETE / folder.name, folder / _REPLACED)
        beside = folder.parent if drafts is None else drafts.expanduser().resolve()
        return cls(
            folder,
            beside / f".{folder.name}{_INCOMPLETE}" / folder.name,
            beside / f".{folder.name}{_REPLACED}",
        )

    @property
    def is_filled(self) -> bool:
        """Whether files move into the folder one by one, because the folder itself has to stay."""
        return self.draft.parent.parent == self.folder


def _can_be_exchanged(folder: Path) -> bool:
    if not folder.is_dir():
        return True
    if folder.is_mount() or Path.cwd().is_relative_to(folder) or not os.access(folder.parent, os.W_OK):
        return False
    # a folder with folders in it is a project's, and others may be at work in there
    listed = manifest.listed(folder)
    return all(each.is_file() or each.name in listed for each in folder.iterdir() if not each.name.startswith("."))


def clear(place: Place) -> None:
    """Make an empty draft, after what a killed save has left was brought to its end."""
    settle(place)
    shutil.rmtree(place.draft.parent, ignore_errors=True)
    shutil.rmtree(_aside(place.former), ignore_errors=True)
    place.draft.mkdir(parents=True)


def commit(place: Place) -> None:
    """Make the complete draft the checkpoint; whoever looks meanwhile, or after a kill, finds the former one or this one."""
    sync(place.draft)
    if place.is_filled:
        # from here on the draft is complete, and `settle` brings it to its end if this process can't
        place.draft.rename(_ready(place))
        _move_in(place)
    elif place.folder.exists():
        place.draft.rename(place.former)
        exchange(place.former, place.folder)
        sync(place.folder.parent)
        _clear_former(place)
    else:
        place.folder.parent.mkdir(parents=True, exist_ok=True)
        place.draft.rename(place.folder)
        sync(place.folder.parent)
    shutil.rmtree(place.draft.parent, ignore_errors=True)


def settle(place: Place) -> None:
    """Bring to its end what a killed save has left half-way."""
    if _ready(place).is_dir():
        _move_in(place)
        shutil.rmtree(place.draft.parent, ignore_errors=True)
    if place.former.is_dir() and not place.folder.exists():
        place.former.rename(place.folder)
    elif place.former.is_dir():
        _clear_former(place)


def wait_until_settled(place: Place) -> None:
    """Wait while another process brings to its end what a killed save has left."""
    end = time.monotonic() + 60
    while (place.former.is_dir() or _ready(place).is_dir()) and time.monotonic() < end:
        time.sleep(0.02)


def discard(place: Place) -> None:
    """Delete a checkpoint; a kill leaves all of it or nothing that could be taken for one."""
    doomed = place.draft.with_name(f"{place.folder.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    doomed.parent.mkdir(exist_ok=True)
    place.folder.rename(doomed)
    shutil.rmtree(place.draft.parent)


def sweep(left: Path) -> None:
    """Delete a draft that nobody writes any more."""
    if left.name.endswith(_INCOMPLETE):
        shutil.rmtree(left, ignore_errors=True)


def exchange(one: Path, other: Path) -> None:
    """Let two folders change places: at once where the system can, else with a moment in which `other` is not there."""
    if _renames_at_once(one, other):
        return
    one.rename(_aside(one))
    other.rename(one)
    _aside(one).rename(other)


def _aside(one: Path) -> Path:
    return one.with_name(f"{one.name}-aside")


def _renames_at_once(one: Path, other: Path) -> bool:
    if sys.platform != "linux":
        return False
    # renameat2(2): flag 2 is RENAME_EXCHANGE, and -100 is AT_FDCWD
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EPERM):  # a file system that can't, NFS for one
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _clear_former(place: Place) -> None:
    """What the person kept beside the former checkpoint stays beside the new one; the rest is deleted."""
    listed = manifest.listed(place.former)
    for each in place.former.iterdir():
        if not (each.name in listed or names.is_ours(each.name) or (place.folder / each.name).exists()):
            each.rename(place.folder / each.name)
    shutil.rmtree(place.former)


def _ready(place: Place) -> Path:
    return place.draft.with_name(f"{place.folder.name}.ready")


def _move_in(place: Place) -> None:
    ready = _ready(place)
    new = sorted(ready.iterdir(), key=lambda each: each.name == names.MANIFEST_NAME)
    stale = manifest.listed(place.folder) | {each.name for each in place.folder.iterdir() if names.is_ours(each.name)}
    if not (place.folder / _INCOMPLETE / "begun").exists():
        for name in stale - {each.name for each in new}:
            remove(place.folder / name)
        (place.folder / _INCOMPLETE / "begun").touch()
    for each in new:
        if (place.folder / each.name).is_dir():
            remove(place.folder / each.name)
        each.replace(place.folder / each.name)
    sync(place.folder)


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
