"""The figures of an estimate of memory as tables of text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_WAYS = {
    "ddp": "DDP: a full copy on each",
    "zero-1": "ZeRO-1: optimizer shared out",
    "zero-2": "ZeRO-2, FSDP SHARD_GRAD_OP: gradients too",
    "zero-3": "ZeRO-3, FSDP FULL_SHARD: weights too",
}


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that a rank has, in bytes, and what that is called."""

    bytes: int
    name: str


def estimate_lines(facts: dict[str, Any], memory_budget: MemoryBudget | None) -> Iterator[str]:
    """The lines of an estimate, from the keys that its JSON has."""
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
    if "mesh" in facts:
        yield from _mesh_text(facts, memory_budget)
    elif facts["num_processes"] > 1:
        for fact in facts["training"]:
            yield ""
            yield f"To train with {facts['optimizer']}, on each of {facts['num_processes']} ranks, {fact['precision']}"
            yield from _table(
                ["", "weights", "gradients", "optimizer", "while a step lasts", "total"],
                [[_WAYS[way], *_row(state, memory_budget)] for way, state in fact["ranks"].items()],
            )
    if "measured" in facts:
        yield from _measured_text(facts["measured"])
    if memory_budget is not None:
        yield ""
        yield _proposal(facts)
    yield ""
    yield "Activations are not counted: they grow with the batch and with the length of its samples."


def _mesh_text(facts: dict[str, Any], memory_budget: MemoryBudget | None) -> Iterator[str]:
    degrees = facts["mesh"]["degrees"]
    yield ""
    yield f"To train with {facts['optimizer']}, on each rank of {_named(degrees)}"
    rows = []
    for fact in facts["mesh"]["training"]:
        for index, stage in enumerate(fact["stages"]):
            name = fact["precision"] if len(fact["stages"]) == 1 else f"{fact['precision']}, stage {index}"
            rows.append([name, *_row(stage, memory_budget)])
    yield from _table(["", "weights", "gradients", "optimizer", "while a step lasts", "total"], rows)


def _measured_text(facts: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"Measured in {facts['run']}, after the first step"
    parts = ("weights", "gradients", "optimizer")
    rows = [
        [
            f"rank {rank['rank']}",
            *(size(rank[part]) for part in parts),
            "" if rank["peak"] is None else size(rank["peak"]),
        ]
        for rank in facts["ranks"]
    ]
    yield from _table(["", *parts, "most on the GPU"], rows)


def _proposal(facts: dict[str, Any]) -> str:
    """The smallest mesh on which the training fits, in a sentence."""
    smallest = facts["smallest_mesh"]
    if smallest is None:
        return "No mesh of shards, split layers and stages fits in mixed precision: a device needs more memory."
    largest = max(stage["total"] for stage in smallest["stages"])
    where = f"The smallest mesh is {_named(smallest['degrees'])}" if smallest["degrees"] else "One rank is enough"
    return f"{where} in mixed precision: {size(largest)} a rank, with a fifth of the memory left for activations."


def _named(degrees: dict[str, int]) -> str:
    return f"{' x '.join(f'{axis} {degree}' for axis, degree in degrees.items()) or 'one rank'} ({math.prod(degrees.values())} ranks)"


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
