"""`accelerate-nb estimate-memory`: what a model takes to compute with and to train, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from accelerate_nb.cli.parser import add_settings, given_settings, spellings
from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.options import parallelism
from accelerate_nb.config.settings import settings
from accelerate_nb.config.value_types import InvalidValue
from accelerate_nb.errors import AccelerateNbError, ConfigurationError
from accelerate_nb.reports.text_format import aligned, bytes_text

if TYPE_CHECKING:
    from accelerate_nb.runtime.world.world import Mesh

_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
_PRECISIONS = ("float32", "mixed", "bfloat16")
_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adam8bit")
_RANKS = [setting for setting in settings(LaunchingConfig) if setting.name == "num_processes"]
_PARTS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "extra": "while a step lasts"}
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
    parser.add_argument(
        "--args",
        type=_keyword_arguments,
        default={},
        metavar="JSON",
        help="The keyword arguments of MODEL's class or function.",
    )
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
        "--mesh",
        metavar="DEGREES",
        help="The mesh of a training, such as dp_shard=4,tp=2: what each of its ranks holds.",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="The memory of a device, such as 24GiB, in place of this machine's."
    )
    trust_help = "Run code that lies beside config.json; only where you have read it."
    parser.add_argument(*spellings("trust_remote_code"), action="store_true", help=trust_help)
    # Accelerate's flag for models of its hub; here a model's files say what it is
    parser.add_argument(*spellings("library_name"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="Write JSON; sizes are in bytes.")
    add_settings(parser, _RANKS)


def run(arguments: argparse.Namespace) -> int:
    """Estimate, and write."""
    facts = _facts(arguments)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if arguments.json else "\n".join(_lines(facts)))
    return 0


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every figure, in bytes, under stable keys."""
    from accelerate_nb.big_models import estimate
    from accelerate_nb.devices.probe import probe
    from accelerate_nb.runtime.world.world import Mesh

    requested = given_settings(arguments, _RANKS).get("num_processes")
    mesh = None if arguments.mesh is None else _mesh(arguments.mesh, requested)
    ranks = mesh.size if mesh is not None else requested or max(1, probe().count)
    memory, device = _device_memory(arguments.memory, ranks)
    try:
        outline = estimate.outline(arguments.model, arguments.args, trusts=arguments.trust_remote_code)
    except AccelerateNbError:
        raise
    except (Exception, SystemExit) as error:  # the user's code, while it builds the model
        file = Path(arguments.model.partition(":")[0]).name
        calls = [call for call in extract_tb(error.__traceback__) if Path(call.filename).name == file]
        is_located = calls and not isinstance(error, SyntaxError)
        where = f" ({calls[-1].filename}, line {calls[-1].lineno})" if is_located else ""
        raise ConfigurationError(
            f"{arguments.model} was to be built, and that failed with {type(error).__name__}: {error}{where}. A file is imported "
            "for this: put training under `if __name__ == '__main__':`, and correct what fails."
        ) from error

    def on_mesh(mesh: Mesh, precision: Any) -> dict[str, Any]:
        stages = estimate.on_mesh(outline, precision, arguments.optimizer, mesh)
        sizes = [{**asdict(stage), "total": stage.total} for stage in stages]
        return {"degrees": dict(mesh.degrees), "precision": precision, "stages": sizes}

    meshes = [mesh] if mesh is not None else [Mesh(dp_replicate=ranks), Mesh(dp_shard=ranks)] if ranks > 1 else []
    smallest = memory and estimate.smallest_mesh(outline, "mixed", arguments.optimizer, memory)
    return {
        "model": outline.source,
        "parameters": sum(weight.numbers for weight in outline.weights if not weight.is_buffer),
        "trained_parameters": sum(weight.numbers for weight in outline.weights if weight.trains),
        "buffers": sum(weight.numbers for weight in outline.weights if weight.is_buffer),
        "largest_layer": estimate.largest_layer(outline, 4)[0],
        "optimizer": arguments.optimizer,
        "num_processes": ranks,
        "device": device,
        "device_memory": memory,
        "inference": [
            {
                "dtype": dtype,
                "total": estimate.bytes_of(outline.weights, estimate.DTYPES[dtype]),
                "largest_layer": estimate.largest_layer(outline, estimate.DTYPES[dtype])[1],
            }
            for dtype in dict.fromkeys(arguments.dtypes)
        ],
        "training": [on_mesh(item, precision) for item in (Mesh(), *meshes) for precision in _PRECISIONS],
        "smallest_mesh": smallest and on_mesh(smallest, "mixed"),
    }


def _mesh(text: str, ranks: int | None) -> Mesh:
    """The mesh of degrees by their axes: `dp_shard=4,tp=2`."""
    from accelerate_nb.runtime.world.world import Mesh

    try:
        degrees = parallelism.DEGREES.parse(re.sub(r"(_size)?\s*=", "_size=", text))
    except InvalidValue as unfit:
        reason = re.sub(r"(?:parallelism_config_)?(\w+)_size", r"\1", str(unfit))  # as the axes are named here
        raise ConfigurationError(
            f"--mesh {text!r} was given, but degrees are written as dp_shard=4,tp=2. {reason}"
        ) from None
    found = Mesh(**parallelism.sizes(degrees))
    return found if ranks is None else found.checked(ranks)


def _device_memory(size: str | None, ranks: int) -> tuple[int | None, str]:
    """The memory of a rank's device, on the CPU a rank's share of the machine's, and what that is called."""
    from accelerate_nb.devices.nvml import GpuGauge
    from accelerate_nb.devices.probe import probe
    from accelerate_nb.devices.usage import HostGauge
    from accelerate_nb.runtime.checkpoints.writer import parse_size

    if size is not None:
        return parse_size(size), "a device"
    devices = probe()
    if devices.kind == "cpu":
        shared = "" if ranks == 1 else f" for {ranks} ranks"
        return HostGauge([]).memory()[1] // ranks, f"this machine's memory{shared}"
    return min(GpuGauge(os.environ).memory_sizes(), default=None), f"this machine's {devices.label}"


def _keyword_arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} should be JSON, but is not: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} should be arguments by their names, as '{{\"hidden\": 128}}'")
    return found


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """The figures as tables of text."""
    memory = facts["device_memory"]

    def total(size: int) -> str:
        fits = "" if memory is None else "  fits" if size <= memory else "  too much"
        return bytes_text(size) + fits

    beside = "" if facts["trained_parameters"] == facts["parameters"] else f", {facts['trained_parameters']:,} trained"
    yield f"{facts['model']}: {facts['parameters']:,} parameters{beside}; {facts['buffers']:,} numbers in buffers"
    if memory is not None:
        yield f"Compared with {facts['device']}: {bytes_text(memory)}"
    yield ""
    yield "To compute with, the weights kept as"
    rows = [["", "total", f"largest layer ({facts['largest_layer']})"]]
    rows += [[fact["dtype"], total(fact["total"]), bytes_text(fact["largest_layer"])] for fact in facts["inference"]]
    yield from ("  " + line for line in aligned(rows))
    yield ""
    yield f"To train with {facts['optimizer']}, on each rank"
    rows = [["", *_PARTS.values(), "total"]]
    for fact in facts["training"]:
        for number, stage in enumerate(fact["stages"]):
            name = f"{_mesh_text(fact['degrees'])}, {fact['precision']}"
            stage_name = "" if len(fact["stages"]) == 1 else f", stage {number}"
            rows.append([name + stage_name, *(bytes_text(stage[part]) for part in _PARTS), total(stage["total"])])
    yield from ("  " + line for line in aligned(rows))
    yield ""
    smallest = facts["smallest_mesh"]
    if smallest:
        size = bytes_text(max(stage["total"] for stage in smallest["stages"]))
        mesh = smallest["degrees"]
        where = f"The smallest mesh is {_mesh_text(mesh)}" if mesh else "One rank is enough"
        yield f"{where} in mixed precision: {size} a rank, with a fifth of the memory left for activations.\n"
    elif memory is not None:
        yield "No mesh of shards, split layers and stages fits in mixed precision: a device needs more memory.\n"
    yield "Activations are not counted: they grow with the batch and with the length of its samples."


def _mesh_text(degrees: dict[str, int]) -> str:
    """A mesh in words, and how many ranks it has: `dp_shard 2 x tp 2 (4 ranks)`."""
    if not degrees:
        return "one rank"
    names = {"dp_replicate": "DDP", "dp_shard": "FSDP"}
    note = names.get("+".join(degrees), f"{math.prod(degrees.values())} ranks")
    return f"{' x '.join(f'{axis} {degree}' for axis, degree in degrees.items())} ({note})"
