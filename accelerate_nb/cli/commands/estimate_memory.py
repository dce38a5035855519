"""`accelerate-nb estimate-memory`: what a model takes to compute with and to train, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

from accelerate_nb.cli.parser import spellings
from accelerate_nb.errors import AccelerateNbError, ConfigurationError

_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
_PRECISIONS = ("float32", "mixed", "bfloat16")
_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adam8bit")
_WAYS = {
    "ddp": "DDP: a full copy on each",
    "zero-1": "ZeRO-1: optimizer shared out",
    "zero-2": "ZeRO-2, FSDP SHARD_GRAD_OP: gradients too",
    "zero-3": "ZeRO-3, FSDP FULL_SHARD: weights too",
}
_EXAMPLES = """examples:
  accelerate-nb estimate-memory ./llama                         a folder with config.json, or with weights
  accelerate-nb estimate-memory model.safetensors --num-processes 4
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
        "--memory", metavar="SIZE", help="The memory of a device, such as 24GiB, in place of this machine's."
    )
    parser.add_argument(
        *spellings("trust_remote_code"),
        action="store_true",
        help="Run code that lies beside config.json; only where you have read it.",
    )
    parser.add_argument("--json", action="store_true", help="Write JSON; sizes are in bytes.")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that a rank has, in bytes, and what that is called."""

    bytes: int
    name: str


def run(arguments: argparse.Namespace) -> int:
    """Estimate, and write."""
    ranks = _ranks(arguments.ranks)
    memory_budget = _memory_budget(arguments.memory, ranks)
    outlined = import_module("accelerate_nb.big_models.model_outline").outline
    with _with_context(arguments.model):
        outline = outlined(arguments.model, _arguments(arguments.args), trusts=arguments.trust_remote_code)
    facts = _estimated(outline, arguments.dtypes, arguments.optimizer, ranks, memory_budget)
    if arguments.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print("\n".join(_text(facts, memory_budget)))
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
    estimating = import_module("accelerate_nb.big_models.memory_estimate")
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


def _with_total(state: Any) -> dict[str, int]:
    return {**asdict(state), "total": state.total}


# ----------------------------------------------------------------------------------------------------------- as text


def _text(facts: dict[str, Any], memory_budget: MemoryBudget | None) -> Iterator[str]:
    beside = "" if facts["trained_parameters"] == facts["parameters"] else f", {facts['trained_parameters']:,} trained"
    yield f"{facts['model']}: {facts['parameters']:,} parameters{beside}; {facts['buffers']:,} numbers in buffers"
    if memory_budget is not None:
        yield f"Compared with {memory_budget.name}: {size(memory_budget.bytes)}"
    yield ""
    yield "To compute with, the weights kept as"
    yield from _table(
        ["", "total", f"largest layer ({facts['largest_layer']})"],
        [
            [fact["dtype"], _beside(fact["total"], memory_budget), size(fact["largest_layer"])]
            for fact in facts["inference"]
        ],
    )
    yield ""
    yield f"To train with {facts['optimizer']}, on one rank"
    yield from _table(
        ["", "weights", "gradients", "optimizer", "16-bit copies", "total"],
        [[fact["precision"], *_row(fact["alone"], memory_budget)] for fact in facts["training"]],
    )
    if facts["num_processes"] > 1:
        for fact in facts["training"]:
            yield ""
            yield f"To train with {facts['optimizer']}, on each of {facts['num_processes']} ranks, {fact['precision']}"
            yield from _table(
                ["", "weights", "gradients", "optimizer", "while a step lasts", "total"],
                [[_WAYS[way], *_row(state, memory_budget)] for way, state in fact["ranks"].items()],
            )
    yield ""
    yield "Activations are not counted: they grow with the batch and with the length of its samples."


def _row(state: dict[str, int], memory_budget: MemoryBudget | None) -> list[str]:
    parts = [size(state[name]) for name in ("weights", "gradients", "optimizer", "extra")]
    return [*parts, _beside(state["total"], memory_budget)]


def _beside(total: int, memory_budget: MemoryBudget | None) -> str:
    """A size, and whether it fits."""
    if memory_budget is None:
        return size(total)
    return f"{size(total)}  {'fits' if total <= memory_budget.bytes else 'too much'}"


def _table(headings: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    for row in (headings, *rows):
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        yield "  " + "   ".join(cells).rstrip()


def size(number: int) -> str:
    """
    Bytes as a readable text.

    >>> size(3 << 29)
    '1.50 GiB'
    """
    amount = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} bytes" if unit == "bytes" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"
