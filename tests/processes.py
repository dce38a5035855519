"""Pythons in processes of their own, and what they wrote."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def python(
    *words: str | Path, folder: Path | None = None, limit: float = 150, check: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A Python with these words, in a folder, with more variables than this process has."""
    variables: Mapping[str, Any] = {**os.environ, **environment}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=limit, check=check, input=""
    )
