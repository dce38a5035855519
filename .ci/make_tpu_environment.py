"""How the virtual environment comes to be in which torch_xla computes on the CPU, as `make test-tpu` wants it."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from install_cpu_torch import answers
from stand_in_for_cuda import main as stand_in_for_cuda

# torch_xla is built for one version of torch, and loads beside no other; 2.9 is its last.
TORCH, TORCH_XLA = "torch==2.9.1", "torch_xla==2.9.0"
OLDEST, NEWEST = (3, 10), (3, 13)
GIB = 1 << 30
# torch is 1.7 GiB until its code for GPUs is taken out, and pip has its wheel (0.9) beside it meanwhile; tests need the rest
ROOM = 6 * GIB
# torch's and torch_xla's own needs, since they are installed without: NVIDIA's packages would come along.
BESIDE = ["filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools"]
BESIDE += ["absl-py", "numpy", "pyyaml", "requests"]
# what NVIDIA's packages are called that torch asks for, up to 2.15 for CUDA 13, and what compiles for its GPUs
NVIDIAS = ("nvidia-", "cuda-", "triton")
WANTED = f"The XLA suite needs {TORCH_XLA}"
WORKS = (
    "import torch, torch_xla; "
    "found = (torch.ones(2, 3, device='xla') @ torch.ones(3, 2, device='xla')).sum().item(); "
    "assert found == 12, found; print('torch', torch.__version__, 'and torch_xla', torch_xla.__version__, 'compute')"
)


def main(folder: str, index: str = "") -> None:
    """Make the environment in `folder`, anew; `index` is PyTorch's of builds for the CPU."""
    stop_for(lacks(Path(folder)))
    python = empty(folder)
    stop_for(unavailable(python))
    install(python, *BESIDE)
    # a build for the CPU comes ready; where there is none, or torch_xla does not load beside it, NVIDIA's is made to do
    for where in [index, ""] if index and answers(index) else [""]:
        install(python, "--no-deps", "--no-compile", "--force-reinstall", *extra(where), TORCH, TORCH_XLA)
        if forget_nvidia(site := site_of(python)):
            stand_in_for_cuda(str(site))
        if works(python):
            return
    sys.exit(f"{TORCH} and {TORCH_XLA} were installed in {folder}, but do not compute: what Python said stands above.")


def can(folder: str) -> None:
    """End with what keeps the environment from being made in `folder`, if anything does; nothing is made there."""
    stop_for(lacks(Path(folder)))
    with TemporaryDirectory() as elsewhere:
        stop_for(unavailable(empty(elsewhere)))


def stop_for(reasons: Iterator[str]) -> None:
    """End with the first reason, if there is one, and with a code that says that this is nobody's mistake."""
    for reason in reasons:
        print(reason, file=sys.stderr)
        sys.exit(os.EX_UNAVAILABLE)


def empty(folder: str) -> str:
    """The Python of a new environment in `folder`; what an interrupted run has left there is none, and goes."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    return str(Path(folder, "bin", "python"))


def lacks(folder: Path) -> Iterator[str]:
    """What this machine lacks for it, a line each: what is wanted, what was found, what to do."""
    version = sys.version_info[:2]
    machine = f"{platform.system()} on {platform.machine()}"
    if machine != "Linux on x86_64":
        yield f"{WANTED}, of which there are builds for Linux on x86_64 only, and this is {machine}: take such a machine."
    if not OLDEST <= version <= NEWEST:
        yield (
            f"{WANTED}, of which there are builds for Python 3.10 to 3.13, and {sys.executable} is "
            f"{version[0]}.{version[1]}: make PYTHON_TPU=python3.11 ..."
        )
    if find_spec("ensurepip") is None:
        yield f"{WANTED} in a virtual environment, and {sys.executable} has no venv module: apt-get install python3-venv."
    if not has_library_of_python():
        yield (
            f"{WANTED}, which loads the library of Python, and {sys.executable} has none that can be found: "
            f"apt-get install libpython{version[0]}.{version[1]}, or a Python built with --enable-shared."
        )
    for tool, package in missing_tools():
        yield f"{WANTED} beside a torch without GPUs, for which `{tool}` is used, and it is not here: apt-get install {package}."
    left = shutil.disk_usage(existing(folder)).free
    if left < ROOM:
        yield f"{WANTED}, for which {ROOM // GIB} GiB are used, and {left / GIB:.1f} GiB are free at {folder}: make room."


def missing_tools() -> Iterator[tuple[str, str]]:
    """The tools that make libraries and are not here, each with the package that has it."""
    for tool, package in (("cc", "gcc"), ("readelf", "binutils")):
        if shutil.which(tool) is None:
            yield tool, package


def has_library_of_python() -> bool:
    """Whether `libpython3.x.so.1.0` can be loaded, as torch_xla wants it; a Python may hold all in its program instead."""
    try:
        ctypes.CDLL(f"libpython{sysconfig.get_python_version()}.so.1.0")
    except OSError:
        return False
    return True


def unavailable(python: str) -> Iterator[str]:
    """What pip says where it finds no builds of the two; nothing is installed."""
    if error := pip_error(*pip(python), "--dry-run", "--no-deps", "--quiet", TORCH, TORCH_XLA):
        yield f"{WANTED} and {TORCH}, and pip found none ({error}): let it reach an index that has them."


def pip_error(*command: str) -> str:
    """The last error of a command of pip; empty where it succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else errors[-1] if errors else "it failed"


def install(python: str, *what: str) -> None:
    """Install into the environment whose Python this is."""
    subprocess.run([*pip(python), "--quiet", *what], check=True)


def site_of(python: str) -> Path:
    """The folder of packages of the environment whose Python this is."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


def forget_nvidia(site: Path) -> bool:
    """Have the installed torch require none of NVIDIA's packages; whether it did, as a build for the CPU does not."""
    required = False
    for metadata in site.glob("torch-*.dist-info/METADATA"):
        lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(tuple(f"Requires-Dist: {name}" for name in NVIDIAS))]
        if len(kept) < len(lines):
            # by name only, and for pip: what is installed after torch would bring them along
            metadata.write_text("".join(kept), encoding="utf-8")
            required = True
    return required


def works(python: str) -> bool:
    """Whether torch_xla computes on its CPU backend."""
    return subprocess.run([python, "-c", WORKS], env={**os.environ, "PJRT_DEVICE": "CPU"}, check=False).returncode == 0


def pip(python: str) -> list[str]:
    """The command that installs."""
    return [python, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]


def extra(index: str) -> list[str]:
    """Where else pip is to look."""
    return ["--extra-index-url", index] if index else []


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


if __name__ == "__main__":
    if sys.argv[1] == "--can":
        can(sys.argv[2])
    else:
        main(*sys.argv[1:])
