"""How the virtual environment comes to be in which DeepSpeed and Megatron-LM train on the CPU, as `make test-scale` wants it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from make_tpu_environment import empty, existing, install, pip, pip_error, stop_for

WANTED = "The suite of DeepSpeed and Megatron-LM"
PACKAGES = ["deepspeed", "megatron-core"]
# what DeepSpeed's setup.py imports, torch aside: it is built from source, and beside the torch that is there
BESIDE = ["setuptools", "wheel", "ninja", "numpy", "packaging", "psutil", "py-cpuinfo", "hjson", "pydantic", "einops"]
# nothing of its C++ is compiled while it is installed, and it looks for no GPU
QUIETLY = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
GIB = 1 << 30
ROOM = 4 * GIB


def main(folder: str, torch: str, index: str = "") -> None:
    """Make the environment in `folder`, anew, with this `torch` for the CPU; `index` is PyTorch's of such builds."""
    stop_for(lacks(Path(folder)))
    python = empty(folder)
    stop_for(unavailable(python))
    here = Path(__file__).parent
    subprocess.run([python, str(here / "install_cpu_torch.py"), torch, index], check=True)
    install(python, *BESIDE)
    # without build isolation, which would fetch another torch, with code for GPUs, to build DeepSpeed beside
    command = [*pip(python), "--quiet", "--no-build-isolation", *PACKAGES]
    subprocess.run(command, env={**os.environ, **QUIETLY}, check=True)


def can(folder: str) -> None:
    """End with what keeps the environment from being made in `folder`, if anything does; nothing is made there."""
    stop_for(lacks(Path(folder)))
    with TemporaryDirectory() as elsewhere:
        stop_for(unavailable(empty(elsewhere)))


def lacks(folder: Path) -> Iterator[str]:
    """What this machine lacks for it, a line each: what is wanted, what was found, what to do."""
    if sys.platform != "linux":
        yield f"{WANTED} is for Linux, and this is {sys.platform}: take such a machine."
    if find_spec("ensurepip") is None:
        yield f"{WANTED} needs a virtual environment, and {sys.executable} has no venv module: apt-get install python3-venv."
    left = shutil.disk_usage(existing(folder)).free
    if left < ROOM:
        yield f"{WANTED} takes {ROOM // GIB} GiB, and {left / GIB:.1f} GiB are free at {folder}: make room."


def unavailable(python: str) -> Iterator[str]:
    """What pip says where it finds no such packages; nothing is installed."""
    for package in PACKAGES:
        if error := pip_error(python, "-m", "pip", "--disable-pip-version-check", "index", "versions", package):
            yield f"{WANTED} needs {package}, and pip found none ({error}): let it reach an index that has it."


if __name__ == "__main__":
    if sys.argv[1] == "--can":
        can(sys.argv[2])
    else:
        main(*sys.argv[1:])
