"""The list of a checkpoint's files, by which damage is recognised."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import file_names

_BLOCK = 1 << 20
_WORD = 1 << 64
# Of a file the first blocks are summed, and of what comes after them one in so many: reading a large file twice would take
# about as long as loading it.
_SUMMED = 16


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One file: how long it is, and a number that damage changes (of a large file, damage to what was summed)."""

    bytes: int
    sum: int


def entry_of(path: Path) -> ManifestEntry:
    """The file as it is now; its sum is that of the 64-bit words of its first 16 MiB, and of each 16th MiB after them."""
    sums: list[int] = []
    # one memory for all blocks: new memory would make the thread that loads the file wait at each of its own
    block = np.empty(_BLOCK, np.uint8)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for number in filter(_counts, range(-(-size // _BLOCK))):
            file.seek(number * _BLOCK)
            length = file.readinto(block.data)
            padded = length + -length % 8
            block[length:padded] = 0
            sums += sums_of(block[:padded], number)
    return ManifestEntry(size, folded(sums))


def _counts(number: int) -> bool:
    return number < _SUMMED or number % _SUMMED == 0


def sums_of(content: np.ndarray[Any, Any], first: int) -> list[int]:
    """The sums of the words of each MiB that counts; the content's length is a multiple of eight, and `first` the file's MiB."""
    words, step = content.view(np.uint64), _BLOCK // 8
    return [
        int(words[start : start + step].sum(dtype=np.uint64))
        for number, start in enumerate(range(0, len(words), step), first)
        if _counts(number)
    ]


def folded(sums: Iterable[int]) -> int:
    """One number of the sums, in their order."""
    total = 0
    for sum_ in sums:
        total = (total * 31 + sum_) % _WORD
    return total


def write(folder: Path, known: Mapping[str, ManifestEntry]) -> None:
    """List all files of a folder in it; `known` holds entries that were made when files were written."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {item.relative_to(folder).as_posix(): item for item in found}
    content = to_bytes({name: known.get(name) or entry_of(item) for name, item in files.items()})
    with (folder / file_names.MANIFEST_NAME).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def to_bytes(entries: Mapping[str, ManifestEntry]) -> bytes:
    """The content of a list's file."""
    files = {name: asdict(entry) for name, entry in entries.items()}
    return json.dumps({"version": 1, "files": files}, indent=1).encode() + b"\n"


def read(folder: Path) -> dict[str, Any] | None:
    """The list of a folder; `None` where there is none, as in what Accelerate writes."""
    path = folder / file_names.MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {**content, "files": {name: ManifestEntry(**entry) for name, entry in content["files"].items()}}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not the list of a checkpoint's files that was expected ({error}). Load another checkpoint; if the other "
            "files are known to be good, delete this one."
        ) from error


def listed(folder: Path) -> set[str]:
    """The names at the top of a folder that its list has as the checkpoint's; none where there is no list that can be read."""
    try:
        content = read(folder)
    except CheckpointError:
        return set()
    return set() if content is None else {name.split("/")[0] for name in content["files"]}


def why_incomplete(folder: Path) -> str | None:
    """The reason why a checkpoint is incomplete, found without reading its files; `None` if it is whole."""
    try:
        content = read(folder)
    except CheckpointError as error:
        return str(error)
    if content is None:
        # Accelerate writes the random states after nearly everything else
        states = any(folder.glob(f"{file_names.RNG_STATE_NAME}_*.pkl"))
        return None if states else f"it holds no {file_names.RNG_STATE_NAME}_*.pkl"
    faults = (_missing_or_cut(folder, name, entry) for name, entry in content["files"].items())
    return next(filter(None, faults), None)


def check(folder: Path, names: Iterable[str] | None) -> None:
    """
    Raise a `CheckpointError` that names a file of the folder's list with another length, or, of `names` or all, other content.

    A file that a hook wrote has to be there, and may have changed.
    """
    content = read(folder)
    if content is None:
        return
    chosen = content["files"] if names is None else set(names)
    for name, entry in content["files"].items():
        fault = _missing_or_cut(folder, name, entry)
        if fault is None and name in chosen and not _is_of_hook(name) and entry_of(folder / name) != entry:
            fault = f"{folder / name} is damaged: its content is not what was written."
        if fault is not None:
            raise CheckpointError(
                f"{fault} Load another checkpoint; if the change was intended, delete {file_names.MANIFEST_NAME} beside it."
            )


def _is_of_hook(name: str) -> bool:
    top = name.split("/", maxsplit=1)[0]
    # the folders of DeepSpeed's engines are `pytorch_model`, `pytorch_model_1`
    return not (file_names.is_ours(top) or top.startswith(file_names.MODEL_NAME))


def _missing_or_cut(folder: Path, name: str, entry: ManifestEntry) -> str | None:
    path = folder / name
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing: {entry.bytes} bytes were expected."
    if size == entry.bytes or _is_of_hook(name):
        return None
    return f"{path} is damaged: {entry.bytes} bytes were expected, and it has {size}."
