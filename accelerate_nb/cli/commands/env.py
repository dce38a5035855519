"""`accelerate-nb env`: what a bug report needs to know of this machine, this Python and these settings."""

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from accelerate_nb import __version__
from accelerate_nb.cli.parser import add_config_file
from accelerate_nb.config.environment import PREFIX, runs_folder
from accelerate_nb.config.formats import plain
from accelerate_nb.config.hf_files import find, read
from accelerate_nb.config.run_config import all_settings, differing, origins, resolve
from accelerate_nb.errors import AccelerateNbError

# A heading's lines: what is known under each name. Values are plain, for JSON.
Facts: TypeAlias = dict[str, Any]

_NOTEBOOKS = ("ipython", "ipykernel", "ipywidgets", "anywidget", "jupyterlab", "notebook", "jupyter_client", "nbformat")
_LIBRARIES = (
    "accelerate", "transformers", "datasets", "safetensors", "numpy", "torchvision", "torchdata", "torchao",
    "deepspeed", "bitsandbytes", "megatron-core", "transformer-engine", "torch_xla", "ray", "lightning",
    "cloudpickle",
)  # fmt: skip
# A notebook service is known by a variable that it sets.
_SERVICES = {
    "COLAB_RELEASE_TAG": "Google Colab",
    "KAGGLE_KERNEL_RUN_TYPE": "Kaggle",
    "BINDER_SERVICE_HOST": "Binder",
    "BINDER_REPO_URL": "Binder",
    "SM_CURRENT_HOST": "Amazon SageMaker",
    "SAGEMAKER_APP_TYPE_LOWERCASE": "Amazon SageMaker Studio",
    "DATABRICKS_RUNTIME_VERSION": "Databricks",
    "PAPERSPACE_NOTEBOOK_REPO_ID": "Paperspace",
    "LIGHTNING_CLOUD_PROJECT_ID": "Lightning",
    "DEEPNOTE_PROJECT_ID": "Deepnote",
    "CODESPACES": "GitHub Codespaces",
    "JUPYTERHUB_USER": "JupyterHub",
    "SLURM_JOB_ID": "a job of Slurm",
    "KUBERNETES_SERVICE_HOST": "a pod of Kubernetes",
}
_VARIABLES = re.compile(
    r"(ACCELERATE|FSDP|PARALLELISM|NCCL|GLOO|TORCH|PYTORCH|CUDA|HIP|ROCR|NVIDIA|XLA|PJRT|TPU|LIBTPU|CLOUD_TPU|COLAB_TPU|OMP|MKL|KMP|HF"
    r"|SLURM|JUPYTER|JPY)(_.*)?"
    r"|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|CPU_NUM_DEVICES|USE_TORCH_XLA|MASTER_(ADDR|PORT)|TMPDIR|XDG_CACHE_HOME|PYTHONPATH"
    r"|PYTHONSTARTUP|LD_PRELOAD|VIRTUAL_ENV|CONDA_DEFAULT_ENV|LD_LIBRARY_PATH"
)
_SECRET = re.compile(
    r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|COOKIE|(?:^|_)PASS(?:$|_)|(?:^|_)(PAT|AUTH)(?:$|_)", re.IGNORECASE
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "********"
_EXAMPLES = """examples:
  accelerate-nb env              text to paste into a report
  accelerate-nb env --json       the same for a program
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = (
        "Print the facts for a bug report: versions, devices, memory, variables, settings.\n"
        "Values of variables whose names speak of tokens, keys or passwords are masked. No driver is woken."
    )
    parser.epilog = _EXAMPLES
    add_config_file(parser, "The configuration file to print, in place of the default one.")
    parser.add_argument("--torch", action="store_true", help="Import torch too, and print how it was built.")
    parser.add_argument("--json", action="store_true", help="Write JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Gather, and write."""
    facts = gather(os.environ, arguments.config_file, with_torch=arguments.torch)
    if arguments.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return 0
    # not before the arguments are read: a help is to come at once
    from accelerate_nb.notebook.display.text import standard_sink
    from accelerate_nb.notebook.display.text_output import LabelledLine

    lines = _lines_of(facts)
    # in a terminal headings stand out
    standard_sink().write([LabelledLine("stdout", line, "title" if line.startswith("###") else "") for line in lines])
    return 0


def gather(environment: Mapping[str, str], config_file: str | None = None, *, with_torch: bool = False) -> Facts:
    """Everything, under the headings in their order; the keys are stable."""
    settings = _configuration(environment, config_file)
    from accelerate_nb.devices.gpus import torch_is_built_for, torch_version
    from accelerate_nb.launching.engines.supervisor import supervisors

    facts = {
        "accelerate_nb": {"version": __version__, "folder": str(Path(__file__).resolve().parents[2])},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "platform": platform.platform(),
            "libc": " ".join(platform.libc_ver()).strip() or None,
        },
        # the devices that it was built for, read without importing it
        "torch": {
            "version": torch_version() or _version("torch"),
            "built_for": [name for name in ("cuda", "hip", "xpu") if torch_is_built_for(name)] or ["cpu"],
            "triton": _version("triton"),
        },
        "devices": _devices(environment),
        "machine": _machine(environment),
        "notebook": {"inside_a_kernel": "JPY_PARENT_PID" in environment, **_versions(_NOTEBOOKS)},
        "libraries": _versions(_LIBRARIES),
        "environment": variables(environment),
        "configuration": settings,
        "supervisors": supervisors(),
        "runs": _runs(environment, settings["settings"].get("folder", {}).get("value")),
    }
    if with_torch:
        torch: Any = import_module("torch")
        facts["torch_build"] = {
            "threads": torch.get_num_threads(),
            "backends": [
                name
                for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
                if torch.distributed.is_available() and getattr(torch.distributed, f"is_{name}_available", bool)()
            ],
            "config": torch.__config__.show().strip(),
            "parallel": torch.__config__.parallel_info().strip(),
        }
    return facts


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter for training, by name; what may be a secret is masked."""
    return {
        name: masked(name, environment[name]) for name in sorted(environment) if _VARIABLES.fullmatch(name) is not None
    }


def masked(name: str, value: str) -> str:
    """A value that can be shown to strangers: secrets, and the password in an address, are masked."""
    return _MASK if value and _SECRET.search(name) else _IN_ADDRESS.sub(_MASK, value)


def _devices(environment: Mapping[str, str]) -> Facts:
    from accelerate_nb.devices.nvml import driver
    from accelerate_nb.devices.probe import probe
    from accelerate_nb.devices.xla import tpu_facts

    found, nvidia = probe(environment), driver()
    facts: Facts = {"kind": found.kind, "count": found.count}
    if nvidia is not None:
        gpus = [{"name": name, "memory_gib": _gib(memory)} for name, memory in nvidia.gpus]
        facts["nvidia"] = {"driver": nvidia.version, "cuda": nvidia.cuda, "gpus": gpus}
    if of_tpus := tpu_facts(environment):
        facts["xla"] = of_tpus
    return facts


def _machine(environment: Mapping[str, str]) -> Facts:
    from accelerate_nb.devices.cpu import cores
    from accelerate_nb.devices.usage import HostGauge

    now = HostGauge([Path.cwd()]).sample()
    shared = now.shared_memory
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware")))
    signs = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman", "/.singularity.d": "Apptainer"}
    return {
        "processor": next(named, platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "usable_cores": cores(),
        "memory_gib": _gib(now.memory[1]),
        "free_memory_gib": _gib(now.memory[1] - now.memory[0]),
        "shared_memory_gib": None if shared is None else _gib(shared[1]),
        "free_shared_memory_gib": None if shared is None else _gib(shared[1] - shared[0]),
        "limits": _limits(),
        "service": next((name for key, name in _SERVICES.items() if environment.get(key)), None),
        "container": next((name for path, name in signs.items() if Path(path).exists()), None),
    }


def _limits() -> Facts:
    """The limits of open files, processes and locked bytes for this user; `None` is no limit."""
    if find_spec("resource") is None:
        return {}
    import resource

    found = {}
    for name, limit in (("open_files", "NOFILE"), ("processes", "NPROC"), ("locked_memory", "MEMLOCK")):
        if (which := getattr(resource, f"RLIMIT_{limit}", None)) is not None:
            soft = resource.getrlimit(which)[0]
            found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def _versions(packages: Iterable[str]) -> Facts:
    """The installed ones of some packages, with their versions."""
    return {name: found for name in packages if (found := _version(name)) is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _configuration(environment: Mapping[str, str], file: str | None) -> Facts:
    """The file, and what it and the variables make different from the defaults; a problem is in `error`."""
    facts: Facts = {"file": None, "content": None, "settings": {}, "error": None}
    try:
        path = find(environment, file)
        if path is not None:
            facts["file"] = str(path)
            facts["content"] = _shown(path)
        content = {} if path is None else read(path)
        whence = origins({}, environment, content)
        facts["settings"] = {
            name: {"value": plain(value), "from": whence[name].source}
            for name, value in differing(resolve({}, environment, content)).items()
        }
    except AccelerateNbError as error:
        facts["error"] = str(error)
        # where runs are kept is known all the same
        if folder := environment.get(f"{PREFIX}FOLDER"):
            facts["settings"] = {"folder": {"value": folder, "from": f"the variable {PREFIX}FOLDER"}}
    return facts


def _shown(path: Path) -> str | None:
    """A file's text without its secrets; `None` where it can't be read as text."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    known = {key for setting in all_settings() for key in setting.keys}
    for index, line in enumerate(lines):
        name, colon, value = line.partition(":")
        if colon and name.strip(" -\"'") not in known and (hidden := masked(name, value.strip())) != value.strip():
            lines[index] = f"{name}: {hidden}"
    return "\n".join(lines)


def _runs(environment: Mapping[str, str], runs: str | None) -> Facts:
    folder = Path(runs).expanduser() if runs else runs_folder(environment)
    there = next(candidate for candidate in (folder, *folder.absolute().parents) if candidate.exists())
    return {
        "folder": str(folder),
        "exists": folder.is_dir(),
        "writable": os.access(there, os.W_OK),
        "free_gib": _gib(shutil.disk_usage(there).free),
    }


def _gib(size: int) -> float:
    return round(size / (1 << 30), 2)


def _lines_of(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts as Markdown, which issues are written in."""
    for heading, inner in facts.items():
        yield f"### {heading.replace('_', ' ') if heading != 'accelerate_nb' else heading}"
        yield from list(_items(inner)) or ["- nothing that differs from the defaults"]
        yield ""


def _items(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if value is None or value in ({}, []):
            continue
        if isinstance(value, Mapping):
            yield f"{indent}- {name}:"
            yield from _items(value, indent + "  ")
        elif isinstance(value, list):
            items = [
                ", ".join(map(_word, item.values())) if isinstance(item, Mapping) else _word(item) for item in value
            ]
            yield f"{indent}- {name}: {', '.join(items)}"
        elif isinstance(value, str) and "\n" in value:
            yield f"{indent}- {name}:"
            yield from (f"{indent}      {line}".rstrip() for line in value.splitlines())
        else:
            yield f"{indent}- {name}: {_word(value)}"


def _word(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
