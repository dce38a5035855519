"""The functions of detached runs, and what a test knows of their processes."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from accelerate_nb import launch
from accelerate_nb.events.event_codec import from_line
from accelerate_nb.events.event_types import StateChange
from tests.waiting import until

SETTINGS: dict[str, Any] = {"num_processes": 2, "cpu": True, "config_file": "", "detach": True, "panel": False}
# On a busy machine a step may take its time.
SETTINGS["stop_grace_period"] = 15.0


def trains(steps: int, pause: float, folder: str) -> tuple[int, int]:
    """Steps that all ranks share, a line and a number for each; waits where the folder holds a file `wait`."""
    import torch

    from accelerate_nb import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    scale = accelerator.knob("scale", 1.0)
    done = 0
    for step in range(steps):
        accelerator.backward(model(torch.ones(4, 2)).mean())
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)
        accelerator.log({"loss": scale.value / (step + 1)}, step=step)
        (Path(folder) / f"step_{accelerator.process_index}").write_text(str(step))
        done += 1
        if accelerator.stop_requested:
            break
        time.sleep(pause)
    return accelerator.process_index, done


def writes_lines(count: int) -> int:
    """Many lines."""
    for number in range(count):
        print("line", number, "of a flood")
    return count


def running(folder: Path, steps: int = 100_000, pause: float = 0.02, **settings: Any) -> Any:
    """A run of `trains` whose ranks have made a step."""
    run = launch(trains, (steps, pause, str(folder)), folder=str(folder), **{**SETTINGS, **settings})
    until(lambda: min(steps_of(folder)) >= 0)
    return run


_LAUNCHES = """
import os, sys
import accelerate_nb
from tests.launching.detached.trainings import trains, SETTINGS
run = accelerate_nb.launch(trains, (int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]), results="all", folder=sys.argv[3], **SETTINGS)
print(run.folder, flush=True)
sys.stdin.read()
"""


def launched_elsewhere(steps: int, pause: float, folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has launched `trains` detached and waits, a kernel's place; and the run's folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHES, str(steps), str(pause), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def status(folder: Path) -> dict[str, Any]:
    """The run's status in its folder."""
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


def host_of(folder: Path) -> psutil.Process:
    """The process that conducts a run."""
    return psutil.Process(status(folder)["pid"])


def supervisor_of(folder: Path) -> psutil.Process:
    """The process that has forked a run's workers, as soon as there are any."""
    until(lambda: _pids_of_ranks(folder))
    return psutil.Process(psutil.Process(_pids_of_ranks(folder)[0]).ppid())


def _pids_of_ranks(folder: Path) -> list[int]:
    path = folder / "events.jsonl"
    # of all that happened, as far as whole lines are there: a short run may be over already
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    details = (
        event.detail for event in map(from_line, lines) if isinstance(event, StateChange) and event.rank is not None
    )
    return [int(detail) for detail in details if detail.isdecimal()]


def processes_of(folder: Path) -> list[psutil.Process]:
    """The run host, the supervisor, and every process that they have started."""
    found: set[psutil.Process] = set()
    for process_of in (host_of, supervisor_of):
        # a run of a moment may be over already
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {process_of(folder), *process_of(folder).children(recursive=True)}
    return list(found)


def until_gone(processes: list[psutil.Process], timeout: float = 10.0) -> None:
    """Wait until none of these processes is left."""
    until(lambda: not any(map(_is_alive, processes)), timeout=timeout)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def steps_of(folder: Path) -> list[int]:
    """The last step of each rank; -1 before the first."""
    paths = [folder / f"step_{rank}" for rank in (0, 1)]
    return [int((path.exists() and path.read_text()) or -1) for path in paths]


def as_another_user(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python code as a user without any rights."""
    # what it imports is imported before: another user may not be able to read this Python
    drop = "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    return subprocess.run([sys.executable, "-c", drop + code, *words], capture_output=True, text=True)
