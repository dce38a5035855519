"""The comparison of what runs on the nodes, before anything starts there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accelerate_nb.errors import LaunchError
from accelerate_nb.transport.messages import NodeFacts

_HEADINGS = ("", "Python", "torch", "accelerate_nb")


def check_versions(here: NodeFacts, nodes: Mapping[str, NodeFacts]) -> None:
    """
    Check that all nodes run what this process runs, as far as functions and tensors are to travel between them.

    That is Python up to its minor version, torch without the name of its build, and this package. Raises `LaunchError` with a
    table of all, in which those that differ are marked.
    """
    expected = _comparable(here)
    differing = {name for name, facts in nodes.items() if _comparable(facts) != expected}
    if differing:
        rows = [("this process", here, False), *((name, facts, name in differing) for name, facts in nodes.items())]
        raise LaunchError(
            f"A run on {', '.join(nodes)} was requested, and {', '.join(sorted(differing))} "
            f"{'has' if len(differing) == 1 else 'have'} other versions than this process:\n\n{_table(rows)}\n\n"
            "Install the same versions there, or name a Python that has them as node_python."
        )


def _comparable(facts: NodeFacts) -> tuple[str, ...]:
    python = ".".join(facts.python.split(".")[:2])
    return python, facts.torch.partition("+")[0], facts.accelerate_nb


def _table(rows: Sequence[tuple[str, NodeFacts, bool]]) -> str:
    cells = [_HEADINGS]
    for name, facts, differs in rows:
        versions = (facts.python, facts.torch or "not installed", facts.accelerate_nb)
        cells.append((f"{name} (differs)" if differs else name, *versions))
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
