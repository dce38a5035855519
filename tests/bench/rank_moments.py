"""What the ranks of a launch measure: when they began, and when their first all-reduce or their first number was done."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Moments = tuple[float, float]


def reduced() -> float:
    """The whole work of a rank: an all-reduce with the others, and when it was done."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    return time.time()


def first_moments(kind: str) -> Moments:
    """The whole work of a rank: when it began, and when its device had computed a number."""
    begun = time.time()
    device = kind
    if kind == "xla":
        import torch_xla

        device = torch_xla.device()
    elif kind == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    assert float((torch.ones(2, device=device) + 1).sum().cpu()) == 4
    return begun, time.time()


def note(folder: str, function: Callable[..., Any], *args: Any) -> None:
    """Leave what a function returns in a folder, for a launcher that returns nothing."""
    Path(folder, f"done_{os.getpid()}").write_text(json.dumps(function(*args)))


def noted(folder: str, size: int) -> list[Any]:
    """What each of so many ranks has left."""
    found = [json.loads(path.read_text()) for path in Path(folder).glob("done_*")]
    assert len(found) == size
    return found


def launched(kind: str, **settings: Any) -> Moments:
    """Seconds of one launch of ours, until the last rank's first line, and until the last rank's first number."""
    from accelerate_nb import launch

    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        settings |= {"folder": folder, "results": "all", "config_file": "", "panel": "off"}
        return _since(begin, launch(first_moments, (kind,), **settings).wait(590))


def spawned(spawn: Callable[..., object], size: int, kind: str, **settings: Any) -> Moments:
    """The same by a `spawn` of torch's or torch_xla's, which calls a function with the rank's number."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        spawn(_noted_on_rank, args=(folder, kind), **settings)
        return _since(begin, noted(folder, size))


def _noted_on_rank(rank: int, folder: str, kind: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    note(folder, first_moments, kind)


def _since(begin: float, moments: Sequence[Moments]) -> Moments:
    return max(begun for begun, _ in moments) - begin, max(done for _, done in moments) - begin
