"""Runs that have ended, as the folders that they left."""

from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path

from accelerate_nb.events.event_types import Metric, StateChange
from accelerate_nb.events.run_folder import RunRecorder

SOURCE = "# -------- arguments: arguments of train\nwarmup = {warmup}\nepochs = 2\n# -------- function: Cell In[{cell}]\ndef train():\n    lr = {lr}\n    return lr\n"


def keep(
    parent: Path, name: str, started: float, lr: float, *, metrics: Sequence[str] = ("loss",), **settings: object
) -> Path:
    """A finished run of two ranks whose loss falls as fast as its learning rate says."""
    folder = parent / f"2024-01-01_{int(started):06}_{name}"
    with closing(RunRecorder(folder)) as record:
        for rank in (0, 1):
            for metric, step in product(metrics, range(10)):
                record.event(Metric(rank, metric, 1 - lr * step + 0.1 * rank, step, started + step))
        record.event(StateChange(None, "finished", started + 61))
        facts = {"name": name, "why": "2 on the CPU", "state": "finished", "started": started, "ended": started + 61}
        record.status(**facts, ranks=2, settings={"num_processes": 2, "timeout": 60.0, **settings})
    (folder / "source.txt").write_text(SOURCE.format(cell=int(started), lr=lr, warmup=round(lr * 20)))
    return folder
