"""`accelerate-nb estimate-memory`: what a model takes to compute with and to train, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from accelerate_nb.cli.parser import spellings
from accelerate_nb.cli.terminal.estimate_tables import MemoryBudget, estimate_lines
from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.errors import AccelerateNbError, ConfigurationError

if TYPE_CHECKING:
    from accelerate_nb.runtime.world.mesh import Mesh

_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
_PRECISIONS = ("float32", "mixed", "bfloat16")
_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adam8bit")
_EXAMPLES = """examples:
  accelerate-nb estimate-memory ./llama                         a folder with config.json, or with weights
  accelerate-nb estimate-memory model.safetensors --num-processes 4
  accelerate-nb estimate-memory ./llama --mesh dp_shard=4,tp=2 --memory 24GiB
  accelerate-nb estimate-memory train.py:Net --args '{"hidden": 128}' --optimizer sgd-momentum
  accelerate-nb estimate-memory torchvision.models:resnet50 --memory 24GiB

Activations are not counted: they grow with the batch and with the length of its samples. Nothing is downloaded.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = (
        "Estimate the memory of a model: its weights in each type, and in training all that a rank holds."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="A folder or file: config.json of transformers, safetensors, a checkpoint of torch, shards. "
        "Or code: path/file.py:name, package.module:name.",
    )
    parser.add_argument("--args", metavar="JSON", help="The keyword arguments of MODEL's class or function.")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=_DTYPES,
        default=list(_DTYPES),
        metavar="DTYPE",
        help=f"The types to keep weights in: {', '.join(_DTYPES)}. All by default.",
    )
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default="adamw", help="The optimizer (default: adamw).")
    parser.add_argument(
        *("-n", *spellings("num_processes")),
        dest="ranks",
        type=int,
        metavar="N",
        help="Number of ranks that share the training; without it, one for each accelerator of this machine.",
    )
    parser.add_argument(
        "--mesh",
        metavar="DEGREES",
        help="The mesh of a training, such as dp_shard=4,tp=2: what each of its ranks holds.",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="The memory of a device, such as 24GiB, in place of this machine's."
    )
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="A run of this model, such as last: what its ranks really held stands beside the estimate.",
    )
    parser.add_argument(
        *spellings("trust_remote_code"),
        action="store_true",
        help="Run code that lies beside config.json; only where you have read it.",
    )
    parser.add_argument("--json", action="store_true", help="Write JSON; sizes are in bytes.")


def run(arguments: argparse.Namespace) -> int:
    """Estimate, and write."""
    mesh = None if arguments.mesh is None else _mesh(arguments.mesh, arguments.ranks)
    ranks = _ranks(arguments.ranks) if mesh is None else mesh.size
    memory_budget = _memory_budget(arguments.memory, ranks)
    outlined = import_module("accelerate_nb.big_models.estimate.model_outline").outline
    with _with_context(arguments.model):
        outline = outlined(arguments.model, _arguments(arguments.args), trusts=arguments.trust_remote_code)
    facts = _estimated(outline, arguments.dtypes, arguments.optimizer, ranks, memory_budget)
    facts |= _on_meshes(outline, arguments.optimizer, mesh, memory_budget)
    if arguments.run is not None:
        facts["measured"] = _measured(arguments.run)
    if arguments.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print("\n".join(estimate_lines(facts, memory_budget)))
    return 0


@contextmanager
def _with_context(model: str) -> Iterator[None]:
    """Errors of the user's code while it builds a model, as one line."""
    try:
        yield
    except AccelerateNbError:
        raise
    except (Exception, SystemExit) as error:
        calls = extract_tb(error.__traceback__)
        in_file = [call for call in calls if Path(call.filename).name == Path(model.partition(":")[0]).name]
        last = (in_file or calls)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        raise ConfigurationError(
            f"{model} was to be built, and that failed with {type(error).__name__}: {error}{where}. A file is imported for this: "
            "put training under `if __name__ == '__main__':`, and correct what fails."
        ) from error


def _ranks(requested: int | None) -> int:
    from accelerate_nb.devices.probe import probe

    if requested is not None and requested < 1:
        raise ConfigurationError(
            f"--num-processes {requested} was given, but it should be at least 1. Pass such a number."
        )
    return requested or max(1, probe().count)


def _mesh(text: str, ranks: int | None) -> Mesh:
    """
    The mesh of degrees by their axes.

    >>> str(_mesh("dp_shard=4,tp=2", None))
    'dp_shard 4 x tp 2'
    """
    from accelerate_nb.runtime.world.mesh import AXES, Mesh

    degrees: dict[str, int] = {}
    for part in text.split(","):
        axis, _, degree = (word.strip() for word in part.partition("="))
        axis = axis.removesuffix("_size")
        if axis not in AXES or not degree.isdigit():
            raise ConfigurationError(
                f"--mesh {text!r} was given, of which {part!r} is no degree. {did_you_mean(axis, AXES)} Write degrees as "
                f"dp_shard=4,tp=2; axes are {', '.join(AXES)}.".replace("  ", " ")
            )
        degrees[axis] = int(degree)
    found = Mesh(**degrees)
    return found if ranks is None else found.checked(ranks)


def _arguments(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigurationError(
            f"--args {text!r} should be JSON, but is not: {error}. Write it as '{{\"hidden\": 128}}'."
        ) from None
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"--args {text!r} should be arguments by their names. Write them as '{{\"hidden\": 128}}'."
        )
    return found


def _memory_budget(size: str | None, ranks: int) -> MemoryBudget | None:
    """The memory of a rank's device; on the CPU a rank's share of the machine's."""
    from accelerate_nb.devices.host_usage import HostGauge
    from accelerate_nb.devices.nvml import GpuGauge
    from accelerate_nb.devices.probe import probe
    from accelerate_nb.runtime.checkpoints.weights import parse_size

    if size is not None:
        return MemoryBudget(parse_size(size), "a device")
    devices = probe()
    if devices.kind == "cpu":
        memory = HostGauge([]).memory()[1]
        return MemoryBudget(
            memory // ranks, "this machine's memory" if ranks == 1 else f"this machine's memory for {ranks} ranks"
        )
    gpus = GpuGauge(os.environ)
    try:
        samples = [gpus.sample(number, time.time()) for number in range(devices.count)]
    finally:
        gpus.close()
    sizes = [sample.memory_total for sample in samples if sample is not None and sample.memory_total]
    return MemoryBudget(min(sizes), f"this machine's {devices.label}") if sizes else None


def _estimated(
    outline: Any, dtypes: Sequence[str], optimizer: str, ranks: int, memory_budget: MemoryBudget | None
) -> dict[str, Any]:
    """Every figure, in bytes, under stable keys."""
    estimating = import_module("accelerate_nb.big_models.estimate.memory_estimate")
    layer, _ = estimating.largest_layer(outline, 4)
    return {
        "model": outline.source,
        "parameters": sum(parameter.numbers for parameter in outline.parameters),
        "trained_parameters": sum(weight.numbers for weight in outline.weights if weight.trains),
        "buffers": sum(buffer.numbers for buffer in outline.buffers),
        "largest_layer": layer,
        "optimizer": optimizer,
        "num_processes": ranks,
        "device_memory": None if memory_budget is None else memory_budget.bytes,
        "inference": [asdict(estimating.loaded(outline, dtype)) for dtype in dict.fromkeys(dtypes)],
        "training": [
            {
                "precision": found.precision,
                "alone": _with_total(found.alone),
                "ranks": {way: _with_total(state) for way, state in found.ranks.items()},
            }
            for found in (estimating.training(outline, precision, optimizer, ranks) for precision in _PRECISIONS)
        ],
    }


def _on_meshes(outline: Any, optimizer: str, mesh: Mesh | None, memory_budget: MemoryBudget | None) -> dict[str, Any]:
    """The figures for each rank of the requested mesh, and the smallest mesh on which a training in mixed precision fits."""
    estimating = import_module("accelerate_nb.big_models.estimate.mesh_estimate")
    found: dict[str, Any] = {}
    if mesh is not None:
        found["mesh"] = {
            "degrees": dict(mesh.degrees),
            "training": [
                _mesh_facts(estimating.on_mesh(outline, precision, optimizer, mesh)) for precision in _PRECISIONS
            ],
        }
    if memory_budget is not None:
        smallest = estimating.smallest_mesh(outline, "mixed", optimizer, memory_budget.bytes)
        found["smallest_mesh"] = smallest and {"degrees": dict(smallest.mesh.degrees), **_mesh_facts(smallest)}
    return found


def _measured(word: str) -> dict[str, Any]:
    """What the ranks of a run held after their first step, in bytes."""
    from msgspec import structs

    from accelerate_nb.config.runs_folder import configured_runs_folder
    from accelerate_nb.events.find_run import find_run
    from accelerate_nb.events.run_reader import view_of

    run = find_run(word, configured_runs_folder(os.environ, None))
    found = [glance for glance in view_of(run).glances() if glance.memory is not None]
    if not found:
        raise ConfigurationError(
            f"The memory of the run {run.folder.name} was requested, but none of its ranks made a step with a prepared optimizer. Name "
            "another run; `accelerate-nb runs` lists them."
        )
    return {
        "run": run.folder.name,
        "ranks": [structs.asdict(glance.memory) for glance in found if glance.memory is not None],
    }


def _mesh_facts(estimate: Any) -> dict[str, Any]:
    return {"precision": estimate.precision, "stages": [_with_total(stage) for stage in estimate.stages]}


def _with_total(state: Any) -> dict[str, int]:
    return {**asdict(state), "total": state.total}
