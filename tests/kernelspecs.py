"""Kernels of other ipykernel versions, for tests: each is this environment with another ipykernel before it on the path."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# ipykernel 6 reads its messages in the thread that a cell blocks; 7.0 knows no cell in a thread; up to 7.3 clicks go to a
# thread of their own where a page asks for one, and from 7.4 on to the cell's.
OTHERS = ("6.29.5", "6.31.0", "7.0.1", "7.1.0", "7.3.0")
INSTALLED = version("ipykernel")


def name_of(ipykernel: str) -> str:
    """The name of the kernel with this ipykernel."""
    return "python3" if ipykernel == INSTALLED else f"ipykernel-{ipykernel}"


def fetched(ipykernel: str) -> Path:
    """The folder that holds this ipykernel alone, fetched once; the test is skipped where that can't be had."""
    folder = _cache() / f"ipykernel-{ipykernel}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*pip, "--target", f"{beside}/new", f"ipykernel=={ipykernel}"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"ipykernel {ipykernel} can't be fetched: {done.stderr.strip().splitlines()[-1:]}")
        if not folder.exists():  # another process of pytest may have been faster
            Path(beside, "new").rename(folder)
    return folder


def python_path(ipykernel: str) -> str:
    """The `PYTHONPATH` with which a kernel of this environment has this ipykernel and this checkout."""
    folders = [] if ipykernel == INSTALLED else [fetched(ipykernel)]
    return os.pathsep.join(
        map(str, [*folders, ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    )


def install(ipykernel: str, kernels: Path) -> str:
    """Put the kernel with this ipykernel among those of a data folder (`share/jupyter/kernels`); gives its name."""
    name = name_of(ipykernel)
    if name == "python3":
        return name
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": name,
        "language": "python",
        "env": {"PYTHONPATH": python_path(ipykernel)},
    }
    folder = kernels / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    return name


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "accelerate_nb_tests"
