"""DeepSpeed's operators in C++, which it compiles when they are first used: announced, and refused where no compiler is."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from accelerate_nb.devices import async_io
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.world.world import World

# What trains without an operator.
_WITHOUT = {
    "fused_adam": "Write \"torch_adam\": true among the optimizer's params in DeepSpeed's configuration, or give prepare an optimizer "
    "of torch's.",
    "async_io": "Offload to the CPU in the place of a disk.",
}
_WITHOUT_CPU = (
    'Offload without it: write "zero_force_ds_cpu_optimizer": false in DeepSpeed\'s configuration, and give prepare an optimizer of '
    "torch's."
)


def announce_builds(world: World) -> None:
    """Have each operator that is compiled in this process say so, once a machine, with the time that it takes."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    if not hasattr(OpBuilder.jit_load, "__wrapped__"):
        OpBuilder.jit_load = announced(OpBuilder.jit_load, world)


def check_disk(config: Any, computes_in_fp16: bool) -> None:
    """Raise `ConfigurationError` where a configuration has weights or states of an optimizer on a disk, and they can't be there."""
    optimizer, weights = (
        config.get_value(f"zero_optimization.offload_{part}.device") == "nvme" for part in ("optimizer", "param")
    )
    if (optimizer or weights) and (complaint := async_io.missing_library()):
        raise ConfigurationError(complaint)
    has_16_bits = any(config.get_value(f"{dtype}.enabled") is True for dtype in ("bf16", "fp16"))
    if weights and not has_16_bits and not computes_in_fp16:
        # zero.Init._set_dtype (0.19.8): `dtype or float16 if is_fp16_supported() else bfloat16`
        raise ConfigurationError(
            "Offload of weights in 32 bits to NVMe was requested on a device without fp16, where DeepSpeed writes them in bf16 all "
            "the same. Pass mixed_precision='bf16', or offload_param_device='cpu'."
        )


@contextmanager
def own_errors() -> Iterator[None]:
    """A block whose error is that of an operator which can't be compiled, where DeepSpeed has put its own around it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, ConfigurationError):
            raise error.__cause__ from None
        raise


def announced(build: Callable[..., Any], world: World) -> Callable[..., Any]:
    """The method that compiles an operator, which says so meanwhile, and shares its folder with no other process."""

    @functools.wraps(build)
    def announcing(builder: Any, verbose: bool = True) -> Any:
        name = str(builder.name)
        folder = _build_folder(name)
        is_built = (folder / f"{name}.so").exists()
        if not is_built:
            _check_compiler(name)
        bar = tqdm(
            total=1,
            desc=f"building {name}, once",
            bar_format="{desc}: {elapsed}",
            disable=is_built or not world.is_local_main,
        )
        with bar, _alone_in(folder):
            module = build(builder, verbose)
            bar.update()
        return module

    return announcing


def _build_folder(name: str) -> Path:
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """
    A block in which no other process builds in a folder.

    torch marks a folder with a file while it builds, and waits for ever for one that a killed process has left behind: such a file
    is removed. The lock here ends with its process.
    """
    with open(folder / ".building", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mark = folder / "lock"
        if mark.exists() and not _is_open(mark):
            mark.unlink(missing_ok=True)
        yield


def _is_open(path: Path) -> bool:
    """Whether a process has a file open, as a build has its mark; elsewhere than on Linux that is taken for granted."""
    processes = [process for process in Path("/proc").glob("[0-9]*") if process.name.isdigit()]
    return not processes or any(_has_open(process, path.resolve()) for process in processes)


def _has_open(process: Path, path: Path) -> bool:
    # it may end meanwhile, or be another user's
    with suppress(OSError):
        for entry in os.scandir(process / "fd"):
            with suppress(OSError):
                if os.readlink(entry.path) == str(path):
                    return True
    return False


def _check_compiler(name: str) -> None:
    """Raise `ConfigurationError` where nothing compiles; ninja that stands beside this Python is found, too."""
    beside = str(Path(sys.executable).parent)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH"), beside]))
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
    if missing:
        raise ConfigurationError(
            f"DeepSpeed's operator {name} was requested, which is compiled when it is first used, and there is no "
            f"{' and no '.join(missing)} here. Install what is missing (apt-get install g++ ninja-build). {_WITHOUT.get(name, _WITHOUT_CPU)}"
        )
