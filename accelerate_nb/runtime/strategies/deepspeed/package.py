"""DeepSpeed itself, loaded for this process's device, quiet, and connected over the process group that is there."""

import fcntl
import functools
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch.distributed as dist

from accelerate_nb.errors import ConfigurationError, MissingExtraError
from accelerate_nb.runtime.compat.packages import is_deepspeed_available
from accelerate_nb.runtime.world.registry import at_world_exit, be_a_group
from accelerate_nb.runtime.world.world import World

_CHOSEN = "DS_ACCELERATOR"
# What its logger warns of at every start: an optimizer other than Adam, which a person has given to prepare, and that a schedule
# asks itself for its first learning rate.
_NO_NEWS = ("ZeRO with an untested optimizer", "learning rate from scheduler before it has started")


def load(world: World) -> ModuleType:
    """The package, for devices of this world's type, whose collectives go over torch's process group."""
    if not is_deepspeed_available():
        raise MissingExtraError(
            "Training with DeepSpeed was requested, and the package is not installed: pip install 'accelerate-nb[deepspeed]'"
        )
    # else it takes the CPU for a machine's GPU wherever it finds one
    os.environ.setdefault(_CHOSEN, world.device.type)
    # DeepSpeed reads its place from torchrun's variables, which no launcher may have set
    for name, value in (("LOCAL_RANK", world.local_rank), ("RANK", world.rank), ("WORLD_SIZE", world.size)):
        os.environ.setdefault(name, str(value))
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    if found != world.device.type:
        raise ConfigurationError(
            f"The training is on {world.device.type}, but DeepSpeed was imported for {found} ({_CHOSEN}="
            f"{os.environ.get(_CHOSEN)}). Make the Accelerator before DeepSpeed is imported, or set {_CHOSEN}={world.device.type}."
        )
    _prepare_builds()
    level = logging.getLevelName(os.environ.get("ACCELERATE_LOG_LEVEL", "").upper())
    logger = logging.getLogger("DeepSpeed")
    # its handler has a level of its own
    speakers: list[Any] = [logger, *logger.handlers]
    for speaker in speakers:
        speaker.setLevel(level if isinstance(level, int) else logging.WARNING)
    # a named function, of which a logger takes one, however many worlds load the package
    logger.addFilter(_is_news)
    # DeepSpeed's own calls, at every gathering of weights; who trains with it can't change them
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    # it is for inference alone, and would be compiled inside of the launch
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        be_a_group(world)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    at_world_exit(_forget_groups)
    return deepspeed  # type: ignore[no-any-return]  # the package has no types


def _prepare_builds() -> None:
    """Have DeepSpeed compile operators one process at a time, with a ninja beside this Python, past marks that killed builds left."""
    # torch marks a folder with a file while it builds, and waits for ever for one that a killed process has left behind
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils import cpp_extension

    build = OpBuilder.jit_load
    if hasattr(build, "__wrapped__"):
        return
    beside = str(Path(sys.executable).parent)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH"), beside]))

    @functools.wraps(build)
    def alone(builder: Any, verbose: bool = True) -> Any:
        folder = Path(cpp_extension._get_build_directory(builder.name, verbose=False))
        with open(folder / ".building", "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_open(folder / "lock"):
                (folder / "lock").unlink(missing_ok=True)
            return build(builder, verbose)

    OpBuilder.jit_load = alone


def _is_open(path: Path) -> bool:
    """Whether a process of this user has a file open, as a build has its mark."""
    target = str(path.resolve())
    opened = (process.info["open_files"] or () for process in psutil.process_iter(["open_files"]))
    return any(file.path == target for files in opened for file in files)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(text in str(record.msg) for text in _NO_NEWS)


def _forget_groups() -> None:
    """Have DeepSpeed make its groups anew in the next world; what it keeps of them would outlive them."""
    from deepspeed.utils import groups

    release = getattr(groups, "_release_process_group_references", None)
    if release is not None:
        release()
    else:  # before DeepSpeed 0.19
        groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups.mpu = groups.mesh_device = None
