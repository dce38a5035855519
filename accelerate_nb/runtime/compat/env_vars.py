"""Environment variables, those that a launcher sets among them, and what NVIDIA's tool tells of a machine."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from accelerate_nb.config.environment import autolog, fp8_backend, set_variables
from accelerate_nb.config.options import deepspeed, fsdp, megatron, parallelism
from accelerate_nb.config.run_config import setting_named
from accelerate_nb.config.value_types import YES, Boolean, InvalidValue
from accelerate_nb.devices.nvml import may_send_directly
from accelerate_nb.errors import ConfigurationError

# What `accelerate.utils.environment` offers.
__all__ = [
    "CPUInformation", "are_libraries_initialized", "check_cuda_fp8_capability", "check_cuda_p2p_ib_support",
    "clear_environment", "convert_dict_to_env_variables", "get_cpu_distributed_information", "get_driver_version",
    "get_gpu_info", "get_int_from_env", "override_numa_affinity", "parse_choice_from_env", "parse_flag_from_env",
    "patch_environment", "purge_accelerate_environment", "set_numa_affinity", "str_to_bool",
]  # fmt: skip

T = TypeVar("T")

_PREFIX = "ACCELERATE_"
_FORBIDDEN = frozenset(";\n<> ")

_log = logging.getLogger("accelerate_nb.utils.environment")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """
    1 for a text that means yes, 0 for one that means no; `True` and `False` with `to_bool`.

    >>> str_to_bool("yes"), str_to_bool("off", to_bool=True)
    (1, False)
    """
    try:
        parsed = Boolean().parse(value)
    except InvalidValue:
        raise ConfigurationError(f"invalid truth value {value.lower()}: it is neither a yes nor a no.") from None
    return parsed if to_bool else int(parsed)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that is a whole number of at least 0, else the default."""
    for key in env_keys:
        number = int(os.environ.get(key, "-1"))
        if number >= 0:
            return number
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether a variable is true; the default where it isn't set."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The value of a variable as it is written; the default where it isn't set."""
    return os.environ.get(key, str(default))


def env_var_path_add(env_var_name: str, path_to_add: str | os.PathLike[str]) -> str:
    """The value of a variable of paths with one more at its end; the variable stays as it is."""
    held = (path for path in os.environ.get(env_var_name, "").split(":") if path)
    return ":".join([*held, str(path_to_add)])


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    r"""
    One line `KEY=value\n` for each variable; those that are empty, or hold one of `; < >`, a space or a new line, are left out.

    >>> convert_dict_to_env_variables({"A": "1", "B": "a b"})
    ['A=1\n']
    """
    lines = []
    for key, value in current_env.items():
        if key and value and _FORBIDDEN.isdisjoint(key + value):
            lines.append(f"{key}={value}\n")
        else:
            _log.warning("Skipping %s=%s: it is empty, or holds one of ; < > or a space or a new line.", key, value)
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """The packages among these that are imported already."""
    return [name for name in library_names if name in sys.modules]


@contextmanager
def clear_environment() -> Iterator[None]:
    """A block without any environment variables; afterwards all are as they were before."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """
    A block with these variables, their names in capitals and their values as text; afterwards they are as they were before.

    >>> with patch_environment(omp_num_threads=1):
    ...     os.environ["OMP_NUM_THREADS"]
    '1'
    """
    with set_variables({name.upper(): str(value) for name, value in kwargs.items()}, os.environ):
        yield


def purge_accelerate_environment(func_or_cls: T) -> T:
    """A decorator: `ACCELERATE_*` variables that a function, or the `test*` methods of a class and of its subclasses, change are put back."""
    if not isinstance(func_or_cls, type):
        return cast("T", _purging(func_or_cls))
    cls: Any = func_or_cls
    _purge_tests(cls)
    cls.__init_subclass__ = classmethod(lambda cls, **_: _purge_tests(cls))
    return func_or_cls


@dataclass
class CPUInformation:
    """A process's ranks among the processes that a launcher for CPUs, such as `mpirun`, has started."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """This process's ranks by the variables of torchrun, Intel's MPI, Open MPI or MVAPICH."""
    return CPUInformation(
        rank=get_int_from_env(["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"], 0),
        world_size=get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1),
        local_rank=get_int_from_env(
            ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"], 0
        ),
        local_world_size=get_int_from_env(
            ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"], 1
        ),
    )


def _purging(function: Any) -> Any:
    @functools.wraps(function)
    def purging(*args: Any, **kwargs: Any) -> Any:
        before = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
        try:
            return function(*args, **kwargs)
        finally:
            # what the function removed stays removed, as Accelerate has it
            for name in [name for name in os.environ if name.startswith(_PREFIX)]:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]

    # the name that Accelerate's own decorator reads
    purging._accelerate_is_purged_environment_wrapped = True  # type: ignore[attr-defined]
    return purging


def _purge_tests(cls: type) -> None:
    for name, method in inspect.getmembers(cls, callable):
        if name.startswith("test") and not hasattr(method, "_accelerate_is_purged_environment_wrapped"):
            setattr(cls, name, _purging(method))


def get_gpu_info() -> tuple[list[str], int]:
    """The names of this machine's GPUs, and how many there are; `OSError` where there is no driver."""
    names = _query("name")
    return names, len(names)


def get_driver_version() -> str:
    """The version of the GPUs' driver; `OSError` where there is none."""
    return _query("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Whether NCCL may send from GPU to GPU directly, as it may unless consumer GPUs have an old driver."""
    try:
        return may_send_directly(get_gpu_info()[0], get_driver_version())
    except (OSError, subprocess.SubprocessError, IndexError):
        return True  # no driver, or one that doesn't answer as expected: nothing is known against it


@functools.cache
def check_cuda_fp8_capability() -> bool:
    """Whether the first GPU has fp8: compute capability 8.9 or newer; torch decides where the driver's tool is not there."""
    try:
        major, minor = map(int, _query("compute_cap")[0].split("."))
    except (OSError, subprocess.SubprocessError, ValueError):
        major, minor = torch.cuda.get_device_capability()
    return (major, minor) >= (8, 9)


def _query(property_name: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={property_name}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True, timeout=60).strip().splitlines()


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near the GPU of its local rank, at the first call for this rank."""
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near the GPU of its local rank, if any; `verbose`, or else `ACCELERATE_DEBUG_MODE`, logs them."""
    if not torch.cuda.is_available():
        return
    properties: Any = torch.cuda.get_device_properties(local_process_index)
    if not hasattr(properties, "pci_bus_id"):
        return  # this torch doesn't report where its GPU sits
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    cores = near(Path("/sys/bus/pci/devices", address)) & os.sched_getaffinity(0)
    if not cores:
        return
    os.sched_setaffinity(0, cores)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        _log.info("Assigning %s cpu cores to process %s: %s", len(cores), local_process_index, sorted(cores))


def near(device: Path) -> set[int]:
    """The cores that the kernel lists as local to a device; none where it lists none."""
    try:
        text = (device / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


@dataclass(frozen=True, slots=True)
class LauncherSettings:
    """The variables that a launcher sets for the `Accelerator`, read once; `None` where nothing is set."""

    cpu: bool
    mixed_precision: str | None
    accumulation_steps: int | None
    debug: bool
    fp8_package: str
    loader_progress: bool
    use_deepspeed: bool
    autolog: bool
    use_fsdp: bool
    use_megatron_lm: bool
    use_parallelism: bool

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LauncherSettings:
        """The values of these variables; `ConfigurationError` names one that does not fit."""

        def given(name: str) -> Any:
            return setting_named(name).in_worker(environment)

        return cls(
            cpu=bool(given("cpu")),
            mixed_precision=given("mixed_precision"),
            accumulation_steps=given("gradient_accumulation_steps"),
            debug=bool(given("debug")),
            fp8_package=fp8_backend(environment),
            loader_progress=bool(given("loader_progress")),
            use_deepspeed=is_yes(environment, deepspeed.STRATEGY.variable),
            autolog=autolog(environment),
            use_fsdp=is_yes(environment, fsdp.STRATEGY.variable),
            use_megatron_lm=is_yes(environment, megatron.STRATEGY.variable),
            use_parallelism=is_yes(environment, parallelism.VARIABLE),
        )


def is_yes(environment: Mapping[str, str], name: str, default: str = "") -> bool:
    """Whether a variable is true; `default` for one that is not set."""
    return environment.get(name, default).lower() in YES
