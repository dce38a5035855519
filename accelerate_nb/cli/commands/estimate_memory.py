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
    """Say which arguments the command takes."""
    parser.description = "Tell what a model takes: its weights in each type, and in training all that a rank holds."
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="A folder or file: config.json of transformers, safetensors, a checkpoint of torch, shards. "
        "Or code: path/file.py:name, package.module:name.",
    )
    parser.add_argument("--args", metavar="JSON", help="What the class or function of MODEL is called with, by name.")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=_DTYPES,
        default=list(_DTYPES),
        metavar="DTYPE",
        help=f"The types to keep weights in: {', '.join(_DTYPES)}. All by default.",
    )
    parser.add_argument(
        "--optimizer", choices=_OPTIMIZERS, default="adamw", help="What trains the model (default: adamw)."
    )
    parser.add_argument(
        "-n",
        "--num-processes",
        "--num_processes",
        dest="ranks",
        type=int,
        metavar="N",
        help="How many ranks share the training; without it, one for each accelerator of this machine.",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="The memory of a device, such as 24GiB, in place of this machine's."
    )
    parser.add_argument(
        "--trust-remote-code",
        "--trust_remote_code",
        action="store_true",
        help="Run code that lies beside config.json; only where you have read it.",
    )
    parser.add_argument("--json", action="store_true", help="Write JSON; sizes are in bytes.")


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a rank has, in bytes, and what that is called."""

    bytes: int
    name: str


def run(arguments: argparse.Namespace) -> int:
    """Estimate, and write."""
    ranks = _ranks(arguments.ranks)
    room = _room(arguments.memory, ranks)
    outlined = import_module("accelerate_nb.big_models.outlines").outline
    with _telling(arguments.model):
        outline = outlined(arguments.model, _arguments(arguments.args), trusts=arguments.trust_remote_code)
    facts = _estimated(outline, arguments.dtypes, arguments.optimizer, ranks, room)
    if arguments.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print("\n".join(_text(facts, room)))
    return 0


@contextmanager
def _telling(said: str) -> Iterator[None]:
    """What anybody's code raises while a model is made of it, told in one line."""
    try:
        yield
    except AccelerateNbError:
        raise
    except (Exception, SystemExit) as error:
        calls = extract_tb(error.__traceback__)
        own = [call for call in calls if Path(call.filename).name == Path(said.partition(":")[0]).name]
        last = (own or calls)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        raise ConfigurationError(
            f"{said} was to be made, and that ended with {type(error).__name__}: {error}{where}. A file is imported for this: "
            "let what trains stand under `if __name__ == '__main__':`, and correct what fails."
        ) from error


def _ranks(said: int | None) -> int:
    from accelerate_nb.devices.probe import probe

    if said is not None and said < 1:
        raise ConfigurationError(f"--num-processes {said} was given, but it should be at least 1. Pass such a number.")
    return said or max(1, probe().count)


def _arguments(said: str | None) -> dict[str, Any]:
    try:
        found = json.loads(said) if said else {}
    except ValueError as error:
        raise ConfigurationError(
            f"--args {said!r} should be JSON, but is not: {error}. Write it as '{{\"hidden\": 128}}'."
        ) from None
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"--args {said!r} should be arguments by their names. Write them as '{{\"hidden\": 128}}'."
        )
    return found


def _room(said: str | None, ranks: int) -> Room | None:
    """The memory of a rank's device; on the CPU a rank's share of the machine's."""
    from accelerate_nb.devices.nvml import Gpus
    from accelerate_nb.devices.probe import probe
    from accelerate_nb.devices.sampling import HostGauge

    if said is not None:
        size: int = import_module("accelerate_nb.runtime.checkpoints.weights").parse_size(said)
        return Room(size, "a device")
    devices = probe()
    if devices.kind == "cpu":
        memory = HostGauge([]).memory()[1]
        return Room(
            memory // ranks, "this machine's memory" if ranks == 1 else f"this machine's memory for {ranks} ranks"
        )
    gpus = Gpus(os.environ)
    try:
        samples = [gpus.sample(number, time.time()) for number in range(devices.count)]
    finally:
        gpus.close()
    sizes = [one.memory_total for one in samples if one is not None and one.memory_total]
    return Room(min(sizes), f"this machine's {devices.label}") if sizes else None


def _estimated(outline: Any, dtypes: Sequence[str], optimizer: str, ranks: int, room: Room | None) -> dict[str, Any]:
    """Every figure, in bytes, under stable keys."""
    estimating = import_module("accelerate_nb.big_models.estimating")
    layer, _ = estimating.largest_layer(outline, 4)
    return {
        "model": outline.source,
        "parameters": sum(one.numbers for one in outline.parameters),
        "trained_parameters": sum(one.numbers for one in outline.weights if one.trains),
        "buffers": sum(one.numbers for one in outline.buffers),
        "largest_layer": layer,
        "optimizer": optimizer,
        "num_processes": ranks,
        "device_memory": None if room is None else room.bytes,
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


def _text(facts: dict[str, Any], room: Room | None) -> Iterator[str]:
    beside = "" if facts["trained_parameters"] == facts["parameters"] else f", {facts['trained_parameters']:,} trained"
    yield f"{facts['model']}: {facts['parameters']:,} parameters{beside}; {facts['buffers']:,} numbers in buffers"
    if room is not None:
        yield f"Compared with {room.name}: {size(room.bytes)}"
    yield ""
    yield "To compute with, the weights kept as"
    yield from _table(
        ["", "total", f"largest layer ({facts['largest_layer']})"],
        [[one["dtype"], _beside(one["total"], room), size(one["largest_layer"])] for one in facts["inference"]],
    )
    yield ""
    yield f"To train with {facts['optimizer']}, on one rank"
    yield from _table(
        ["", "weights", "gradients", "optimizer", "16-bit copies", "total"],
        [[one["precision"], *_row(one["alone"], room)] for one in facts["training"]],
    )
    if facts["num_processes"] > 1:
        for one in facts["training"]:
            yield ""
            yield f"To train with {facts['optimizer']}, on each of {facts['num_processes']} ranks, {one['precision']}"
            yield from _table(
                ["", "weights", "gradients", "optimizer", "while a step lasts", "total"],
                [[_WAYS[way], *_row(state, room)] for way, state in one["ranks"].items()],
            )
    yield ""
    yield "Activations are not counted: they grow with the batch and with the length of its samples."


def _row(state: dict[str, int], room: Room | None) -> list[str]:
    parts = [size(state[name]) for name in ("weights", "gradients", "optimizer", "extra")]
    return [*parts, _beside(state["total"], room)]


def _beside(total: int, room: Room | None) -> str:
    """A size, and whether it fits."""
    if room is None:
        return size(total)
    return f"{size(total)}  {'fits' if total <= room.bytes else 'too much'}"


def _table(headings: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    for row in (headings, *rows):
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        yield "  " + "   ".join(cells).rstrip()


def size(number: int) -> str:
    """
    Bytes as people say them.

    >>> size(3 << 29)
    '1.50 GiB'
    """
    amount = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} bytes" if unit == "bytes" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"
