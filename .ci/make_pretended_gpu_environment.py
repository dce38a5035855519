"""How the virtual environment comes to be in which torch computes on pretended GPUs, as `make test-pretended-gpu` wants it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from make_tpu_environment import (
    empty,
    existing,
    forget_nvidia,
    install,
    missing_tools,
    pip,
    pip_error,
    site_of,
    stop_for,
)
from stand_in_for_cuda import Library, build, forget_machine_code, read, stand_ins

# torch's build for CUDA 13, and the header with CUDA's structures; what else it needs, since it is installed without.
TORCH, RUNTIME = "torch==2.11.0", "nvidia-cuda-runtime==13.0.96"
BESIDE = ["filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools", "numpy"]
GIB = 1 << 30
ROOM = 4 * GIB
WANTED = "The suite on pretended GPUs"
SOURCES = Path(__file__).parent / "pretended_gpu"
# Where success is not enough: versions that torch compares, and handles that it looks into.
_ANSWERS = {
    "cudnnGetVersion": "unsigned long {}(void) {{ return 91900; }}",
    "cudnnGetCudartVersion": "unsigned long {}(void) {{ return 13000; }}",
    "cublasLtGetVersion": "unsigned long {}(void) {{ return 130100; }}",
    "cudnnGetProperty": "int {}(int which, int *value) {{ static const int parts[] = {{9, 19, 0}}; *value = parts[which]; return 0; }}",
    "cublasCreate_v2": "int {}(void **handle) {{ static int made; *handle = &made; return 0; }}",
    "cudnnCreate": "int {}(void **handle) {{ static int made; *handle = &made; return 0; }}",
    "cublasGetMathMode": "int {}(void *handle, int *mode) {{ *mode = 0; return 0; }}",
    "cublasGetPointerMode_v2": "int {}(void *handle, int *mode) {{ *mode = 0; return 0; }}",
    "cuDeviceGetCount": (
        "extern int pretended_is_awake(void); int {}(int *count) {{ *count = 1; return pretended_is_awake() ? 0 : 3; }}"
    ),
    "cuDevicePrimaryCtxGetState": (
        "extern int pretended_is_awake(void); "
        "int {}(int device, unsigned *flags, int *active) {{ *flags = 0; *active = pretended_is_awake(); return 0; }}"
    ),
}
WORKS = (
    "import torch; x = torch.ones(2, 3, device='cuda'); assert (x @ x.T).sum().item() == 12; "
    "print('torch', torch.__version__, 'computes on', torch.cuda.device_count(), 'pretended GPUs')"
)


def main(folder: str) -> None:
    """Make the environment in `folder`, anew."""
    stop_for(lacks(Path(folder)))
    python = empty(folder)
    stop_for(unavailable(python))
    install(python, *BESIDE)
    install(python, "--no-deps", "--no-compile", TORCH)
    site = site_of(python)
    forget_nvidia(site)
    pretend(python, site)
    libraries = str(site / "torch" / "lib")
    # where NVML is found, which the loader finds for torch alone
    Path(folder, ".libraries").write_text(libraries)
    environment = {**os.environ, "PRETENDED_GPUS": "2", "LD_LIBRARY_PATH": libraries}
    if subprocess.run([python, "-c", WORKS], env=environment, check=False).returncode:
        sys.exit(f"{TORCH} was installed in {folder}, but does not compute: what Python printed stands above.")


def can(folder: str) -> None:
    """End with what keeps the environment from being made in `folder`, if anything does; nothing is made there."""
    stop_for(lacks(Path(folder)))
    with TemporaryDirectory() as elsewhere:
        stop_for(unavailable(empty(elsewhere)))


def lacks(folder: Path) -> Iterator[str]:
    """What this machine lacks for it, a line each: what is wanted, what was found, what to do."""
    machine = f"{platform.system()} on {platform.machine()}"
    if machine != "Linux on x86_64":
        yield f"{WANTED} is for Linux on x86_64, and this is {machine}: take such a machine."
    if find_spec("ensurepip") is None:
        yield f"{WANTED} needs a virtual environment, and {sys.executable} has no venv module: apt-get install python3-venv."
    for tool, package in missing_tools():
        yield f"{WANTED} compiles what stands in for NVIDIA's libraries with `{tool}`, which is not here: apt-get install {package}."
    left = shutil.disk_usage(existing(folder)).free
    if left < ROOM:
        yield f"{WANTED} takes {ROOM // GIB} GiB, and {left / GIB:.1f} GiB are free at {folder}: make room."


def unavailable(python: str) -> Iterator[str]:
    """What pip says where it finds no such builds; nothing is installed."""
    for wanted in (TORCH, RUNTIME):
        if error := pip_error(*pip(python), "--dry-run", "--no-deps", "--quiet", wanted):
            yield f"{WANTED} needs {wanted}, and pip found none ({error}): let it reach an index that has it."


def pretend(python: str, site: Path) -> None:
    """Put what stands in for NVIDIA's libraries beside torch's, and have torch take its operators where PRETENDED_GPUS is set."""
    folder = site / "torch" / "lib"
    libraries = [read(path) for path in sorted(folder.glob("*.so*"))]
    with TemporaryDirectory() as elsewhere:
        headers = Path(elsewhere, "headers")
        subprocess.run(
            [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", elsewhere, RUNTIME], check=True
        )
        for wheel in Path(elsewhere).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(headers)
        found = next(headers.rglob("driver_types.h")).parent
        # cudart.c says by itself what this header would
        (found / "crt").mkdir(exist_ok=True)
        (found / "crt" / "host_defines.h").touch()
        include = ("-O1", "-fvisibility=hidden", f"-I{found}", f"-I{SOURCES}")
        beside = _with_missing(libraries, "cudart.c", "cuda", 801)
        build(folder / "libcudart.so.13", beside, ["libcudart.so.13"], *include)
    runtime = (f"-L{folder}", "-l:libcudart.so.13")
    build(
        folder / "libnccl.so.2",
        _with_missing(libraries, "nccl.c", "nccl", 3),
        [],
        "-O2",
        "-fvisibility=hidden",
        *runtime,
    )
    build(folder / "libnvidia-ml.so.1", (SOURCES / "nvml.c").read_text(), [], f"-I{SOURCES}")
    # the driver's names have no versions
    driver = {
        name for one in libraries for name, version in one.expects if not version and re.match("cu[A-Z](?!ile)", name)
    }
    build(
        folder / "libcuda.so.1",
        "\n".join(map(_succeeds, sorted(driver | {"cuInit", "cuDeviceGetCount"}))),
        [],
        *runtime,
    )
    ours = [read(folder / name) for name in ("libcudart.so.13", "libnccl.so.2", "libcuda.so.1")]
    for name, source, versions in stand_ins([*libraries, *ours], {path.name for path in folder.iterdir()}, _succeeds):
        build(folder / name, source, versions, *runtime)
    for library in libraries:
        if library.path.name.startswith("libtorch_cuda"):
            forget_machine_code(library.path)
    shutil.copy(SOURCES / "operators.py", site / "pretended_gpu_operators.py")
    with (site / "torch" / "__init__.py").open("a", encoding="utf-8") as init:
        init.write('\nif __import__("os").environ.get("PRETENDED_GPUS"):\n    import pretended_gpu_operators\n')


def _with_missing(libraries: list[Library], file: str, prefix: str, code: int) -> str:
    """The source of a library, and beside it a function that fails with `code` for each name that torch expects and it lacks."""
    source = (SOURCES / file).read_text()
    versioned = {"cuda": "libcudart.so.13", "nccl": ""}[prefix]
    expected = {
        name for one in libraries for name, version in one.expects if version == versioned and name.startswith(prefix)
    }
    lacking = sorted(name for name in expected if f" {name}(" not in source and f"*{name}(" not in source)
    return "\n".join([source, *(f"EXPORT int {name}(void) {{ return {code}; }}" for name in lacking)])


def _succeeds(name: str) -> str:
    """The C code of a function of another library that reports success; of a profiler, that there is nothing to see."""
    if name in _ANSWERS:
        return _ANSWERS[name].format(name)
    if name.endswith(("ErrorString", "ErrorName", "StatusString")):
        return f'const char *{name}(void) {{ return "pretended"; }}'
    return f"long {name}(void) {{ return {1 if name.startswith('cupti') else 0}; }}"


if __name__ == "__main__":
    if sys.argv[1] == "--can":
        can(sys.argv[2])
    else:
        main(*sys.argv[1:])
