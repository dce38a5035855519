"""What a kernel would say, messages of runs that never ran; and what a page says to it."""

import json
import math
import random
from pathlib import Path
from typing import Any

Message = dict[str, Any]

GIB = 2**30
PAGE = Path(__file__).parents[3] / "accelerate_nb" / "notebook" / "page"
STARTED = 1_790_000_000.0
SECONDS = 74.0


def give(page: Any, **message: Any) -> None:
    """Give the page another message."""
    # as text: playwright looks at every number of a value that it hands over, which takes seconds
    page.evaluate("(text) => give(JSON.parse(text))", json.dumps(message))


def sent(page: Any, action: str) -> list[Message]:
    """What the page has sent that asks for something."""
    return page.evaluate("(action) => model.sent.filter((message) => message.do === action)", action)


def start(size: int, **more: Any) -> Message:
    """The first message of a run that can be acted on."""
    run = {
        "name": "train",
        "why": "local: one machine, the supervisor is warm",
        "folder": "/home/me/.accelerate_nb/runs/train-7",
        "started": STARTED,
        "size": size,
        "host": "jupyter",
        "background": False,
        "can_act": True,
        **more,
    }
    return {"seq": 1, "reset": True, "run": run, "now": STARTED + SECONDS, "state": {"state": "running"}}


def running(size: int, steps: int = 240) -> list[Message]:
    """A run in the middle: lines in colours, four metrics, bars, devices and a machine that is nearly out of disk."""
    chance = random.Random(7)
    body: Message = {
        "seq": 2,
        "ranks": [[rank, "running", "", 60] for rank in range(size)],
        "progress": [bar for rank in range(size) for bar in _bars(rank, size)],
        "steps": [[rank, [0.4 + rank % 3, 12.5, 21.0, 4.0, 2.5, 0.6]] for rank in range(size)],
        "memory": [[rank, [2 * GIB, 2 * GIB, 4 * GIB, 40 * GIB, GIB], 80 * GIB, "holds much"] for rank in range(size)],
        "devices": [[rank, f"cuda:{rank % 8}", 80 + rank % 17, int(55 * GIB), 80 * GIB] for rank in range(size)],
        "host": [
            ["cpu", 48.0, 100.0, "%"],
            ["memory", 141 * GIB, 256 * GIB, "B"],
            ["disk", 1.86 * 1024 * GIB, 2.0 * 1024 * GIB, "B"],
            ["shared memory", 7.7 * GIB, 126 * GIB, "B"],
        ],
        "metrics": [[name, rank, points] for rank in range(size) for name, points in _metrics(rank, steps, chance)],
        "lines": _lines(size, chance),
    }
    body["line_count"] = len(body["lines"])
    return [start(size), body]


def _bars(rank: int, size: int) -> list[list[Any]]:
    done = 332 - 6 * (rank % 13)
    return [[rank, "epoch", 2, 10, None, "it", 0], [rank, "train", done, 600, 25.0 - rank % 13 / 4, "it", 0]]


def _metrics(rank: int, steps: int, chance: random.Random) -> list[tuple[str, list[list[Any]]]]:
    def at(step: int) -> float:
        return STARTED + SECONDS * step / steps

    loss = [[s, 2.4 * math.exp(-s / 90) + 0.3 + chance.gauss(0, 0.04), at(s)] for s in range(steps)]
    rate = [[s, 3e-4 * (1 + math.cos(math.pi * s / 600)) / 2, at(s)] for s in range(steps)]
    norm = [[s, 1.2 * math.exp(-s / 140) + chance.random() * 0.25, at(s)] for s in range(steps)]
    speed = [[s, 800 + 40 * math.sin(s / 9 + rank) - 6 * rank, at(s)] for s in range(0, steps, 4)]
    return [("loss", loss), ("lr", rate), ("grad_norm", norm), ("samples/s", speed)]


def _lines(size: int, chance: random.Random) -> list[list[Any]]:
    lines: list[list[Any]] = []
    for step in range(0, 240, 6):
        for rank in range(size):
            at = STARTED + SECONDS * step / 240 + rank / 100
            loss = 2.4 * math.exp(-step / 90) + 0.3 + chance.gauss(0, 0.04)
            text = f"\x1b[36mstep\x1b[0m {step:5d}  loss \x1b[1m{loss:.4f}\x1b[0m  lr {3e-4:.2e}  \x1b[32mok\x1b[0m"
            lines.append([rank, 0, text, at, 0])
        if step % 60 == 30:
            lines.append(
                [1 % size, 1, "UserWarning: The dataloader has few workers, which may be a bottleneck.", at, 0]
            )
    # one colour lacks its numbers
    lines.append([0, 0, "saving\x1b[38;5;208m check\x1b[48;2mpoint\x1b[0m …", STARTED + SECONDS, 1])
    return lines


def failed(size: int = 4) -> list[Message]:
    """A run that ended with a KeyError on rank 1."""
    messages = running(size)
    failure = {
        "rank": 1,
        "type": "KeyError",
        "message": "'label'",
        "advice": "The batch has the keys 'input_ids', 'labels': a collate function renames 'label'. Read batch['labels'].",
        "frames": [
            ["Cell In[12], line 31", "train", "loss = step(model, batch)", True],
            ["Cell In[9], line 6", "step", 'targets = batch["label"]', True],
            ["torch/utils/data/_utils/pin.py, line 81", "__getitem__", "return self.data[name]", False],
            ["transformers/tokenization.py, line 251", "__getitem__", "return self.data[item]", False],
        ],
        "traceback": "Traceback (most recent call last):\n  Cell In[12], line 31, in train\n    loss = step(model, batch)\nKeyError: 'label'",
        "last_lines": [],
        "others": ["rank 0: waited in all_reduce", "rank 2: waited in all_reduce", "rank 3: waited in all_reduce"],
    }
    states = [[rank, "failed" if rank == 1 else "stopped", "", 60] for rank in range(size)]
    end = {"state": "failed", "detail": "rank 1: KeyError", "ended": STARTED + 75}
    return [*messages, {"seq": 3, "ranks": states, "failure": failure, "state": end}]


STACKS = """rank 0:
  Cell In[12], line 31, in train
    accelerator.backward(loss)
rank 1:   ◀ elsewhere than the others
  Cell In[9], line 6, in step
    time.sleep(1000)
rank 2:
  Cell In[12], line 31, in train
    accelerator.backward(loss)"""
