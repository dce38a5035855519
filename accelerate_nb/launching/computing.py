"""What the ranks of a launch compute on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Computing:
    """`size` ranks, the `kind` of their devices in torch's word, and `where` that is, in a person's."""

    size: int
    kind: str
    where: str
    # the variables that show workers no other devices than those that were asked for
    shows: Mapping[str, str] = field(default_factory=dict)
    # how many ranks are threads of one process
    per_process: int = 1
