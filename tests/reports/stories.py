"""Runs that never happened, told as events: what front ends have to show."""

import math

from accelerate_nb.events import event_types
from accelerate_nb.events.run_state import RunState
from accelerate_nb.reports.summary import RunFacts

STARTED = 1_800_000_000.0
GB = 10**9


def facts(name: str = "train", size: int = 2) -> RunFacts:
    return RunFacts(name, f"{size} processes on this machine, forked by the supervisor", "/runs/train", STARTED, size)


def view_of(*events: event_types.Event, size: int = 0) -> RunState:
    view = RunState(size)
    for event in events:
        view.apply(event)
    return view


def training(size: int = 2, steps: int = 300) -> RunState:
    """A run in its midst: lines, metrics, bars, devices."""
    view = view_of(event_types.StateChange(None, "running", STARTED), size=size)
    for rank in range(size):
        view.apply(event_types.StateChange(rank, "running", STARTED + 1, "4711"))
    for step in range(steps):
        time = STARTED + 1 + step / 10
        for rank in range(size):
            loss = 2.3 * math.exp(-step / 120) + 0.3 + 0.05 * math.sin(step * 0.7 + rank)
            view.apply(event_types.Metric(rank, "loss", loss, step, time))
            if rank == 0:
                view.apply(event_types.Metric(0, "lr", 3e-4 * (1 - step / steps / 2), step, time))
            if step % 10 == 0:
                text = f"\x1b[36mstep {step:>5}\x1b[0m loss \x1b[1m{loss:.4f}\x1b[0m grad_norm 0.7"
                view.apply(event_types.LogLine(rank, "stdout", text, time))
    view.apply(event_types.LogLine(0, "stderr", "UserWarning: careful <script>alert(1)</script>", STARTED + 2))
    for rank in range(size):
        view.apply(event_types.Progress(rank, "train", steps // 2 + rank, steps, STARTED + 30, 24.9, "it"))
        view.apply(event_types.DeviceSample(rank, f"cuda:{rank}", 87.0, 55 * GB, 80 * GB, STARTED + 30))
    shares = [(used * GB, total * GB) for used, total in ((141, 256), (1860, 2000), (8, 64))]
    view.apply(event_types.HostSample(50.0, *shares, STARTED + 30))
    return view


def end(view: RunState, state: str = "finished") -> RunState:
    """The same run when it is over."""
    for rank in view.ranks:
        if view.rank(rank).failure is None:
            view.apply(event_types.StateChange(rank, state, STARTED + 31))
    view.apply(event_types.StateChange(None, state, STARTED + 32))
    return view


def finished(size: int = 2, steps: int = 300) -> RunState:
    view = training(size, steps)
    for rank in range(size):
        view.apply(event_types.Progress(rank, "train", steps, steps, STARTED + 31, 24.9, "it", closed=True))
    return end(view)


def of_torch(place: str, function: str, source: str) -> event_types.Frame:
    return event_types.Frame(f"torch/nn/{place}", function, source, False)


FAILURE = event_types.Failure(
    rank=1,
    type="ValueError",
    message="Expected input batch_size (32) to match target batch_size (16).",
    traceback="  Cell In[3], line 9, in train\n    loss = criterion(model(x), y)\nValueError: Expected input batch_size …",
    time=STARTED + 30,
    frames=(
        event_types.Frame("Cell In[3], line 9", "train", "loss = criterion(model(x), y)", True),
        of_torch("modules/module.py, line 1775", "_wrapped_call_impl", "return self._call_impl(*args)"),
        of_torch("modules/module.py, line 1786", "_call_impl", "return forward_call(*args, **kwargs)"),
        of_torch("functional.py, line 3462", "cross_entropy", "return torch._C._nn.cross_entropy_loss("),
    ),
    advice="The last batch is shorter: pass drop_last=True to the DataLoader, or pad it.",
)


def failed(size: int = 4) -> RunState:
    view = training(size)
    for rank in range(size):
        view.apply(event_types.StepBreakdown(rank, 300, 0.025, 0.005, 0.01, 0.0, 0.0, 0.0, STARTED + 30, workers=0))
    view.apply(FAILURE)
    view.apply(event_types.StateChange(1, "failed", STARTED + 30))
    lost = ("DistBackendError", "Connection closed by peer", "…", STARTED + 31)
    for rank in (0, *range(2, size)):
        view.apply(event_types.Failure(rank, *lost, lost_connection=True))
        view.apply(event_types.StateChange(rank, "failed", STARTED + 31))
    view.apply(event_types.StateChange(None, "failed", STARTED + 32))
    return view


def idle_warning(size: int = 2) -> RunState:
    view = training(size)
    text = "Nothing has come for 65 s. Rank 0 waits in all_reduce, rank 1 is in Cell In[3], line 12."
    view.apply(event_types.IdleWarning(65.0, text, STARTED))
    return view
