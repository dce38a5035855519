"""The facts of this node: versions of what runs on it, and its devices."""

from __future__ import annotations

import platform
import socket
import time
from importlib.metadata import PackageNotFoundError, version

from accelerate_nb.devices.probe import probe
from accelerate_nb.transport.messages import NodeFacts


def facts_of_this_node(address: str) -> NodeFacts:
    """The facts of the machine that this process is on, which other nodes know by an address; torch is not imported."""
    devices = probe()
    return NodeFacts(
        host=socket.gethostname(),
        address=address,
        python=platform.python_version(),
        torch=_version("torch"),
        accelerate_nb=_version("accelerate_nb"),
        device_kind=devices.kind,
        device_label=devices.label,
        devices=devices.count,
        cores=devices.cores,
        time=time.time(),
    )


def clock_offset(facts: NodeFacts, sent: float, received: float) -> float:
    """By how many seconds the clock of a node is ahead, which was queried and has replied then; 0 where that is less than can be measured."""
    offset = facts.time - (sent + received) / 2
    return offset if abs(offset) > (received - sent) / 2 else 0.0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
