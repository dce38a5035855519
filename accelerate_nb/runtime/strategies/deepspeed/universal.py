"""An engine's checkpoint in DeepSpeed's universal form, which any number of processes loads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.world.world import World


@contextmanager
def converted(world: World, folder: Path, tag: str) -> Iterator[Path]:
    """A folder beside `folder` with its engine in the universal form, until the block ends; all processes enter it."""
    other = folder.with_name(f".{folder.name}.universal")
    complaint = _convert(folder / tag, other / tag) if world.is_main else None
    try:
        complaint = next((text for text in gather_object([complaint]) if text is not None), None)
        if complaint is not None:
            raise CheckpointError(complaint)
        yield other
    finally:
        world.barrier()
        if world.is_main:
            shutil.rmtree(other, ignore_errors=True)


def _convert(source: Path, target: Path) -> str | None:
    """Convert with DeepSpeed's own script; returns what went wrong."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return None
    last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
    return (
        f"{source} was saved by another number of processes, and DeepSpeed could not convert it to its universal form ({last}). "
        "It converts what Adam and AdamW remember. Load it with as many processes as saved it."
    )


@contextmanager
def expected_by(engine: Any) -> Iterator[None]:
    """A block in which an engine loads the universal form."""
    config = engine._config
    before, config.load_universal_checkpoint = config.load_universal_checkpoint, True
    try:
        yield
    finally:
        config.load_universal_checkpoint = before
