"""The devices of torch_xla: TPUs, and the CPU where that is requested; counted without waking its runtime."""

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate_nb.config.environment import TPU_VARIABLES, requests_tpu
from accelerate_nb.devices.gpus import torch_version

# What is worth having loaded before a worker is forked: three seconds of imports, and no thread or device in any of them.
MODULES = (
    "torch_xla",
    "torch_xla.core.xla_model",
    "torch_xla.runtime",
    "torch_xla._internal.pjrt",
    "torch_xla.distributed.parallel_loader",
)
_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# Google's numbers for its chips, as torch_xla 2.9 knows them (`torch_xla/_internal/tpu.py`).
_GENERATIONS = {"0x0027": "v2 or v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "7x"}
# Those with two devices on a chip, which torch_xla drives as threads of one process.
_RETIRED = "v2 or v3"
_LABELS = {"TPU": "TPU chip", "CPU": "XLA CPU device"}
# A process that computes on a chip has its file open (`tpu_info/device.py` finds users of chips in the same way).
_CHIP_FILE = re.compile(r"/dev/(accel|vfio/)\d+")
# Variables that number one process, which torch_xla does not replace; with the name under which torch_xla
# reads the same of the whole machine (`build_tpu_env_from_vars` of `torch_xla/_internal/tpu.py`).
_PROCESS_VARIABLES = {
    "CLOUD_TPU_TASK_ID": "TPU_WORKER_ID",
    "TPU_PROCESS_BOUNDS": "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS",
    # "local" on Kaggle, where libtpu then says "Expected 8 worker addresses, got 1"
    # (https://github.com/huggingface/transformers/issues/28204)
    "TPU_PROCESS_ADDRESSES": "",
    "TPU_PROCESS_PORT": "",
}
# What torch_xla writes into the environment of a process that has used it, for that process alone.
_OF_A_FORMER_USE = ("PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT", "XLA_USE_SPMD", "XLA_AUTO_SPMD")


@dataclass(frozen=True, slots=True)
class XlaInstallation:
    """The versions of torch_xla and of torch that are installed, empty for what is not; `libtpu` drives the chips."""

    torch_xla: str = ""
    torch: str = ""
    libtpu: bool = False


@dataclass(frozen=True, slots=True)
class XlaDevices:
    """The devices of torch_xla: `device` as `PJRT_DEVICE` names it, and how many, each for a process of its own."""

    device: str
    count: int
    # the environment, or a chip that is there, requests it
    requested: bool = True
    # why no worker could compute there, and what to do
    trouble: str = ""
    # who holds the devices, where this very process does
    held: str = ""
    # this process has loaded torch_xla, which then requests the CPU by itself; many a library loads it
    by_import: bool = False

    @property
    def label(self) -> str:
        return _LABELS.get(self.device, f"{self.device} device")


def detect_devices(
    environment: Mapping[str, str], pci: Path = _PCI, installed: XlaInstallation | None = None
) -> XlaDevices | None:
    """The torch_xla devices of a process with this environment; `None` where there are none and none is requested."""
    versions = installation() if installed is None else installed
    device = environment.get("PJRT_DEVICE", "").upper().partition("_")[0]
    if not versions.torch_xla:
        trouble = (
            f"{_asking(environment)} requests a TPU, but torch_xla, through which PyTorch computes on TPUs, is not installed. "
            "pip install 'accelerate-nb[tpu]', or pass cpu=True."
        )
        return XlaDevices("TPU", 0, trouble=trouble) if requests_tpu(environment) else None
    if device not in {"", "TPU", "CPU"}:
        trouble = (
            f"PJRT_DEVICE={device} requests {device} devices of torch_xla, but TPU and CPU are what is offered through it. "
            "Unset PJRT_DEVICE: GPUs are used without torch_xla."
        )
        return XlaDevices(device, 0, trouble=trouble)
    chips = tpu_chips(pci)
    if device != "CPU" and (chips or requests_tpu(environment)):
        return _tpu(environment, chips, versions)
    if trouble := _misfit(versions) or _no_number(environment, "CPU_NUM_DEVICES"):
        return XlaDevices("CPU", 0, requested=bool(device), trouble=trouble)
    return XlaDevices("CPU", int(environment.get("CPU_NUM_DEVICES") or 1), requested=bool(device))


def tpu_chips(pci: Path = _PCI) -> list[str]:
    """The generation of each TPU chip of this machine, each of which is one device but for `v2 or v3`."""
    found = []
    for folder in sorted(pci.glob("*")):
        with suppress(OSError):
            vendor, device = ((folder / name).read_text(encoding="ascii").strip() for name in ("vendor", "device"))
            if vendor == _GOOGLE and device in _GENERATIONS:
                found.append(_GENERATIONS[device])
    return found


def installation() -> XlaInstallation:
    """The installed versions, read without importing any of the packages."""
    if not is_installed():
        return XlaInstallation()
    libtpu = bool(os.environ.get("TPU_LIBRARY_PATH")) or find_spec("libtpu") is not None
    return XlaInstallation(installed_version("torch_xla") or "unknown", torch_version() or "", libtpu)


def is_installed() -> bool:
    """Whether torch_xla can be imported."""
    return find_spec("torch_xla") is not None


def loaded_early(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The modules that workers with this environment will need to compute through torch_xla; none where they won't."""
    found = detect_devices(environment)
    return MODULES if found is not None and found.requested and not found.trouble else ()


def for_others(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of workers that compute without torch_xla, also where something that they import loads it."""
    variables = {name: value for name, value in environment.items() if name != "PJRT_DEVICE"}
    return {**variables, "PJRT_SELECT_DEFAULT_DEVICE": "0"} if is_installed() else variables


def for_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would keep several processes of one machine from finding their chips."""
    # Notebook services set what holds for one process with all chips, and torch_xla keeps it. On one of several machines it stays.
    variables = {name: value for name, value in environment.items() if name not in _OF_A_FORMER_USE}
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return variables
    for name, of_machine in _PROCESS_VARIABLES.items():
        value = variables.pop(name, None)
        if value is not None and of_machine:
            variables.setdefault(of_machine, value)
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        if "," in variables.get(name, ""):
            del variables[name]
    return variables


def is_awake() -> bool:
    """Whether torch_xla's runtime holds its devices in this process; the call does not wake it."""
    library = sys.modules.get("_XLAC")
    return library is not None and bool(library._xla_runtime_is_initialized())


def holder_in_process(device: str) -> str:
    """The holder of torch_xla's devices in this process, as text; empty where nothing holds them."""
    process = f"this process ({os.getpid()})"
    if is_awake():
        return f"torch_xla's runtime is awake in {process}"
    if device == "TPU" and _holds_a_chip(Path("/proc/self")):
        return f"{process} computes on the chips already, through JAX or TensorFlow"
    return ""


def holders(processes: Path = Path("/proc")) -> list[int]:
    """The processes, of those that this one may inspect, which hold a TPU's chip."""
    return sorted(int(path.name) for path in processes.glob("[0-9]*") if _holds_a_chip(path))


def tpu_facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """The devices that torch_xla would use, or the reason why it can't; nothing where there is neither it nor a TPU."""
    installed, found, chips = installation(), detect_devices(environment), tpu_chips()
    if not installed.torch_xla and found is None and not chips:
        return {}
    import psutil

    from accelerate_nb.devices.tpu_info import generation

    facts: dict[str, Any] = {
        "torch_xla": installed.torch_xla or None,
        "libtpu": installed_version("libtpu") or (installed.libtpu or None),
        "tpu_info": installed_version("tpu-info"),
        "tpu_chips": len(chips),
        "generation": generation(),
    }
    if found is not None:
        facts |= {"device": found.device, "count": found.count, "asked_for": found.requested}
        facts["trouble"] = found.trouble or None
    if chips:
        facts["held_by"] = [{"process": pid, "name": None} for pid in holders()]
        for holder in facts["held_by"]:
            # a command may not be seen
            with suppress(psutil.Error):
                holder["name"] = psutil.Process(holder["process"]).name()
    return facts


def read_environment_again() -> None:
    """In a process forked with torch_xla loaded: have it write what it adds to the environment, which is a new one now."""
    # the functions that `import torch_xla` calls (`torch_xla/__init__.py`); they keep what is set already
    loaded = sys.modules.get("torch_xla")
    if loaded is None or is_awake():
        return
    for name in ("_setup_default_env", "_setup_xla_flags", "_setup_tpu_vm_library_path"):
        if (function := getattr(loaded, name, None)) is not None:
            function()
    if os.environ.get("XLA_REGISTER_INSTALLED_PLUGINS", "1") == "1":
        loaded.plugins.use_dynamic_plugins()


def wake(process: int, processes: int) -> None:
    """Have torch_xla's runtime begin, if it hasn't, in this process, number `process` of `processes` on this machine."""
    # As `torch_xla.launch` does in each process (`torch_xla/_internal/pjrt.py`): one that is alone on a TPU gets one chip, several
    # get all of them, a chip each.
    if is_awake():
        return
    from torch_xla import runtime
    from torch_xla._internal import pjrt

    if processes > 1 or runtime.device_type() != "TPU":
        pjrt.initialize_multiprocess(process, processes)
    else:
        pjrt.initialize_singleprocess()
    os.environ["PJRT_DEVICE"] = str(runtime.device_type())


def random_state() -> int | None:
    """The state of the random numbers of this rank's device; `None` where the runtime is asleep."""
    if not is_awake():
        return None
    import torch_xla.core.xla_model as model

    return int(model.get_rng_state())


def set_random_state(state: int | None) -> None:
    """Have the random numbers of this rank's device go on from a state, or begin with a seed, where the runtime is awake."""
    if state is None or not is_awake():
        return
    import torch_xla.core.xla_model as model

    model.set_rng_state(state)


def _tpu(environment: Mapping[str, str], chips: list[str], versions: XlaInstallation) -> XlaDevices:
    trouble = _misfit(versions) or _no_number(environment, "TPU_NUM_DEVICES")
    if not trouble and not chips:
        trouble = (
            f"{_asking(environment)} requests a TPU, but there is no TPU chip on this machine's PCI bus. Choose a machine with a "
            "TPU (on Colab by Runtime > Change runtime type, on Kaggle by Settings > Accelerator), or pass cpu=True."
        )
    if _RETIRED in chips:
        trouble = (
            "A TPU was requested, but this machine's chips are of TPU v2 or v3, with two cores each that are threads of one process, "
            "and here a rank is a process. Choose a TPU v5e or v6e, as Colab and Kaggle offer them, or pass cpu=True; Hugging Face's "
            "Accelerate trains on TPU v2 and v3."
        )
    if not trouble and not versions.libtpu:
        trouble = (
            "This machine's TPU was requested, but libtpu, torch_xla's driver of the chips, is not installed. "
            "pip install 'torch_xla[tpu]', or pass cpu=True."
        )
    shown = environment.get("TPU_VISIBLE_CHIPS") or environment.get("TPU_VISIBLE_DEVICES") or ""
    visible = len(shown.split(",")) if shown else len(chips)
    if not trouble and visible not in {1, len(chips)}:
        trouble = (
            f"TPU_VISIBLE_CHIPS={shown} shows some of this machine's {len(chips)} TPU chips, but torch_xla's processes find each "
            "other on all of them only. Unset it, or name one chip."
        )
    if trouble:
        return XlaDevices("TPU", 0, trouble=trouble)
    alone = visible < len(chips) or environment.get("TPU_NUM_DEVICES") == "1"
    return XlaDevices("TPU", 1 if alone else len(chips))


def _misfit(versions: XlaInstallation) -> str:
    """The reason why this torch_xla does not load beside this torch; empty where it does."""
    required, installed = _minor(versions.torch_xla), _minor(versions.torch)
    if not required or not installed or required == installed:
        return ""
    return (
        f"Computing through torch_xla was requested, but torch_xla {versions.torch_xla} loads beside torch {required} only, and torch "
        f"{versions.torch} is installed. pip install 'torch=={required}.*' 'torch_xla[tpu]=={required}.*', or pass cpu=True."
    )


def _no_number(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value or (value.isdecimal() and int(value)):
        return ""
    return f"{name}={value!r} is set in the environment, but is no number of devices. Set 1 or more, or unset it."


def _asking(environment: Mapping[str, str]) -> str:
    return next((f"{name}={environment[name]}" for name in TPU_VARIABLES if name in environment), "The environment")


def _minor(number: str) -> str:
    """The first two parts of a version, which torch and torch_xla share."""
    found = re.match(r"\d+\.\d+", number)
    return found[0] if found else ""


def installed_version(package: str) -> str | None:
    """The version of an installed package, which is not imported; `None` where it is not there."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _holds_a_chip(process: Path) -> bool:
    try:
        return any(_CHIP_FILE.fullmatch(os.readlink(entry)) for entry in (process / "fd").iterdir())
    except OSError:
        # it has ended, or belongs to another user
        return False
