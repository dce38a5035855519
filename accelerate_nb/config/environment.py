"""The environment variables of a launch, read at this one border."""

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from accelerate_nb.config.value_types import NO

# The prefix of this package's variables, and the names of those that are no settings.
PREFIX = "ACCELERATE_NB_"
NO_SETTINGS = frozenset({"CONFIG_FILE", "WARM", "SCRIPT_WORDS", "RUN_FOLDER", "ATTEMPT", "JOIN"})
# Has an `Accelerator`, also Accelerate's own, compute on the CPU.
USE_CPU = "ACCELERATE_USE_CPU"
# Names the package that computes in 8-bit floats.
FP8_BACKEND = "ACCELERATE_FP8_BACKEND"
# Variables that mark a machine, or a notebook service's request, as a TPU.
TPU_VARIABLES = ("PJRT_DEVICE", "TPU_NAME", "TPU_ACCELERATOR_TYPE", "COLAB_TPU_1VM", "COLAB_TPU_ADDR")


def already_launched(environment: Mapping[str, str]) -> bool:
    """Whether this process is a launcher's worker already: torchrun's, ours, or any that speaks their language."""
    # notebooks often set RANK=0 and WORLD_SIZE=1 by hand for a library that wants them, and mean to launch all the same
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and size.isdecimal()):
        return False
    return int(size) > 1 or "TORCHELASTIC_RUN_ID" in environment


def autolog(environment: Mapping[str, str]) -> bool:
    """Whether a worker reports metrics that its code did not log by `Accelerator.log`: the setting `autolog`."""
    return environment.get(f"{PREFIX}AUTOLOG", "").lower() not in NO


def fp8_backend(environment: Mapping[str, str]) -> str:
    """The package that computes in 8-bit floats; `NO`, where none is named, leaves the choice open."""
    return environment.get(FP8_BACKEND) or "NO"


def attempt_variables(folder: Path, attempt: int) -> dict[str, str]:
    """The variables through which a worker knows its run's folder, and which attempt of the run it belongs to."""
    return {f"{PREFIX}RUN_FOLDER": str(folder), f"{PREFIX}ATTEMPT": str(attempt)}


def attempt_of(environment: Mapping[str, str]) -> tuple[Path, int] | None:
    """The folder of the run that this process is a worker of, and the number of the attempt; `None` where there is no run."""
    folder, attempt = environment.get(f"{PREFIX}RUN_FOLDER"), environment.get(f"{PREFIX}ATTEMPT", "")
    return (Path(folder), int(attempt)) if folder and attempt.isdecimal() else None


def runs_folder(environment: Mapping[str, str], requested: str | None = None) -> Path:
    """The folder in which each run has its own, as an absolute path: the requested one, or one in the user's cache."""
    # where there is no cache to write to, it is a temporary one
    import tempfile  # seldom needed, and slow to import

    cache = None if requested else _cache(environment)
    # the folder, or the first of its parents that is there; Path.exists would raise an error below one that can't be searched
    there = next((folder for folder in (cache, *cache.parents) if os.path.exists(folder)), None) if cache else None
    if requested:
        folder = Path(requested)
    elif cache and there and there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        folder = cache / "accelerate_nb_runs"
    else:
        user = str(os.getuid()) if hasattr(os, "getuid") else environment.get("USERNAME", "user")
        folder = Path(tempfile.gettempdir()) / f"accelerate_nb_runs-{user}"
    return folder.expanduser().absolute()


def _cache(environment: Mapping[str, str]) -> Path | None:
    """The platform's folder for what a user can do without."""
    cache = environment.get("XDG_CACHE_HOME") or (environment.get("LOCALAPPDATA") if sys.platform == "win32" else None)
    if cache:
        return Path(cache)
    home = environment.get("HOME") or environment.get("USERPROFILE")
    if not home:
        return None
    return Path(home, *(("Library", "Caches") if sys.platform == "darwin" else (".cache",)))


@contextmanager
def set_variables(values: Mapping[str, str], environment: MutableMapping[str, str]) -> Iterator[None]:
    """Inside the block, the environment has these variables too."""
    before = {name: environment.get(name) for name in values}
    environment.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value


def requests_tpu(environment: Mapping[str, str]) -> bool:
    """Whether the environment is that of a TPU's machine, or requests one; `PJRT_DEVICE` decides where it is set."""
    # Colab sets COLAB_TPU_1VM on every machine, and leaves it empty where there is no TPU
    if device := environment.get("PJRT_DEVICE"):
        return device.upper().startswith("TPU")
    return "TPU_NAME" in environment or any(environment.get(name) for name in TPU_VARIABLES)


def warms_early(environment: Mapping[str, str]) -> bool:
    """Whether a notebook that names a launcher may start its supervisor at once; `ACCELERATE_NB_WARM=0` forbids it."""
    return environment.get("ACCELERATE_NB_WARM", "1").lower() not in {"0", "false", "no", "off"}
