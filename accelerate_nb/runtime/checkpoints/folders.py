"""Where checkpoints lie, and how one comes to its place whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.handlers import ProjectConfiguration
from accelerate_nb.runtime.world import World

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def folder_to_write(asked: str | os.PathLike[str] | None, project: ProjectConfiguration) -> Path:
    """Where the next checkpoint goes: where the project's numbering says, else where the person says."""
    if project.automatic_checkpoint_naming:
        folder = _numbered_in(project) / f"checkpoint_{project.iteration}"
        if folder.exists():
            raise ConfigurationError(
                f"Checkpoint directory {folder} ({project.iteration}) already exists. Set "
                "`accelerator.project_configuration.iteration` to a number that is free."
            )
        return folder
    if asked is None:
        raise ConfigurationError(
            "save_state() was called without a folder, and checkpoints are not numbered automatically. Pass a folder, or "
            "project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    return Path(asked).expanduser()


def folder_to_read(asked: str | os.PathLike[str] | None, project: ProjectConfiguration) -> Path:
    """Where the checkpoint lies that is to be loaded: where the person says, else the latest of the numbered ones."""
    if asked is not None:
        folder = Path(asked).expanduser()
        if not folder.is_dir() and _replaced(folder).is_dir():
            return _replaced(folder)  # the process died between two renames: the former checkpoint is still whole
        if not folder.is_dir():
            raise ConfigurationError(
                f"Tried to find {folder} but folder does not exist. Pass a folder that save_state wrote."
            )
        return folder
    if not project.automatic_checkpoint_naming:
        raise ConfigurationError(
            "No input_dir provided and automatic checkpoint naming is disabled. Pass the folder that save_state wrote."
        )
    existing = numbered(_numbered_in(project))
    if not existing:
        raise CheckpointError(f"There is no checkpoint in {_numbered_in(project)} yet. Call save_state() first.")
    return existing[-1]


def numbered(folder: Path) -> list[Path]:
    """The numbered checkpoints of a folder, oldest first; whatever else lies there is left alone."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), each) for each in folder.iterdir() if (match := _NUMBERED.fullmatch(each.name))]
    return [each for _, each in sorted(found)]


def prune(project: ProjectConfiguration) -> None:
    """Delete the oldest numbered checkpoints that are more than the project keeps."""
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return
    existing = numbered(_numbered_in(project))
    for folder in existing[: max(0, len(existing) - project.total_limit)]:
        shutil.rmtree(folder)


@contextmanager
def written_whole(folder: Path, world: World) -> Iterator[Path]:
    """
    A folder to write into that becomes `folder` when every process has written all of its files.

    All processes enter together and leave together. A failure on one is an error on all, and leaves what was there before.
    """
    draft = folder.parent / f".{folder.name}.incomplete" / folder.name
    _clear_draft(draft, world)
    finished = False
    try:
        yield draft
        finished = True
    except OSError as error:
        raise CheckpointError(f"{folder} was not written: {error}. What was there before is unchanged.") from error
    finally:
        agreed = all_agree(world, finished)
    if not agreed:
        raise CheckpointError(f"{folder} was not written: another process failed. What was there before is unchanged.")
    _publish(draft, folder, world)


def _clear_draft(draft: Path, world: World) -> None:
    if world.is_local_main:
        shutil.rmtree(draft.parent, ignore_errors=True)
    world.barrier()
    draft.mkdir(parents=True, exist_ok=True)


def _publish(draft: Path, folder: Path, world: World) -> None:
    if world.is_main:
        _put_in_place(draft, folder)
    world.barrier()
    # on machines with disks of their own, each has its own draft; on a shared disk there is none left
    if world.is_local_main and not world.is_main and draft.exists():
        _put_in_place(draft, folder)
    world.barrier()


def _put_in_place(draft: Path, folder: Path) -> None:
    sync(draft)
    former = _replaced(folder)
    if folder.exists():
        shutil.rmtree(former, ignore_errors=True)
        folder.rename(former)
    draft.rename(folder)
    sync(folder.parent)
    draft.parent.rmdir()
    if former.exists():
        _carry_over(former, folder)
        shutil.rmtree(former)


def _carry_over(former: Path, folder: Path) -> None:
    """What the person kept beside the former checkpoint stays beside the new one."""
    for each in former.iterdir():
        if not (folder / each.name).exists() and not is_ours(each.name):
            each.rename(folder / each.name)


_OURS = re.compile(
    r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt"
    r"|random_states_\d+\.pkl|(positions|gradients)_\d+\.pkl|custom_checkpoint_\d+\.pkl"
)


def is_ours(name: str) -> bool:
    """Whether a file name is one that a checkpoint writes."""
    return _OURS.fullmatch(name) is not None


def _replaced(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.replaced"


def _numbered_in(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ConfigurationError(
            "automatic_checkpoint_naming=True needs a place to number checkpoints in. Pass project_dir as well."
        )
    return Path(project.project_dir).expanduser() / "checkpoints"


def write_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file beside its place, bring it to the disk, then rename it: a reader sees the old one or the new one."""
    draft = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
    try:
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def all_agree(world: World, here: bool) -> bool:
    """Whether it is so on every process; waits for all of them."""
    if world.size == 1:
        return here
    answer = torch.tensor(int(here), device=world.device)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    return bool(answer.item())
