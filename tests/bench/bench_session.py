"""How long an empty cell, and one with a single all-reduce, take on two ranks: a session, ipyparallel and nbdistributed in turn."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.rows import Row, main

CELLS = 100
LIMIT = 180
# Everything else that they need is there where this package is developed; with their needs, they would bring a torch of their own.
PEERS = ("ipyparallel", "nbdistributed", "decorator")

# What all programs begin with; each then says how it runs a cell on both ranks and comes back when both have answered.
TIMED = """
import json, socket, statistics, sys, time

SETUP = '''
import torch, torch.distributed as dist
t = torch.ones(1)
if not dist.is_initialized():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d", rank=%s, world_size=2)
dist.all_reduce(t)
'''

def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]

def tell(run):
    def median(cell):
        times = []
        for _ in range(int(sys.argv[1])):
            began = time.perf_counter()
            run(cell)
            times.append(time.perf_counter() - began)
        return statistics.median(times[len(times) // 10:])
    print(json.dumps({"empty": median("pass"), "all_reduce": median("dist.all_reduce(t)")}), flush=True)
"""

PROGRAMS = {
    "accelerate_nb": """
import tempfile
from accelerate_nb.config.run_config import resolve
from accelerate_nb.launching.session import Session

with tempfile.TemporaryDirectory() as folder:
    session = Session.start(resolve({"num_processes": 2, "cpu": True, "folder": folder}, {}))
    session.run(SETUP % (0, "rank")).wait()
    tell(lambda cell: session.run(cell).wait())
    session.close()
""",
    "ipyparallel": """
import ipyparallel

with ipyparallel.Cluster(n=2, log_level=50) as clients:
    both, port = clients[:], free_port()
    both.scatter("rank", [0, 1], flatten=True, block=True)
    both.execute(SETUP % (port, "rank"), block=True)
    tell(lambda cell: both.execute(cell, block=True))
""",
    # what its %%distributed sends; the magic itself looks for the answer every 100 ms
    "nbdistributed": """
import contextlib
from nbdistributed.communication import CommunicationManager
from nbdistributed.process_manager import ProcessManager

def checked(answers):
    wrong = [one["error"] for one in answers.values() if "error" in one]
    assert not wrong, wrong

with contextlib.redirect_stdout(sys.stderr):
    processes = ProcessManager()
    port = processes.start_workers(2, "127.0.0.1", None)
    workers = CommunicationManager(2, port)
    until = time.monotonic() + 90
    while True:
        # what is sent to a worker that has not come up yet is lost
        try:
            checked(workers.send_to_all("execute", SETUP % (0, "rank"), timeout=3))
            break
        except TimeoutError:
            if time.monotonic() > until:
                raise
try:
    tell(lambda cell: checked(workers.send_to_all("execute", cell)))
finally:
    with contextlib.redirect_stdout(sys.stderr):
        workers.shutdown()
        processes.shutdown()
""",
}


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The medians of all, and the ratios to ours, over rounds in which one comes after the other."""
    with tempfile.TemporaryDirectory() as folder:
        excuse = installed(Path(folder))
        names = list(PROGRAMS) if excuse is None else ["accelerate_nb"]
        if excuse is not None:
            print(f"The peers are skipped: {excuse}")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name in names:
                found[name] += measured(name, Path(folder))
    rows = []
    for cell in found["accelerate_nb"][0] if found["accelerate_nb"] else ():
        medians = {name: statistics.median(item[cell] for item in rounds) for name, rounds in found.items() if rounds}
        ours = medians["accelerate_nb"]
        rows += [
            Row(f"{cell}: {name}", 1e3 * value, "ms", None if value is ours else value / ours, "ours")
            for name, value in medians.items()
        ]
    return rows


def installed(folder: Path) -> str | None:
    """Install the peers into a folder of their own; why that can't be done, where it can't."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PEERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    return None if done.returncode == 0 else f"pip can't install them: {done.stderr.strip().splitlines()[-1]}"


def measured(name: str, folder: Path) -> list[dict[str, float]]:
    """The medians of one round, in seconds; none, and a line that says why, where the program fails."""
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2]), str(folder)]
    # nbdistributed starts whatever "python" is
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PATH": found}
    command = [sys.executable, "-c", TIMED + PROGRAMS[name], str(CELLS)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True, env=environment)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        messages = str(error.stderr or error).strip().splitlines()
        print(f"{name} is left out of a round: {messages[-1] if messages else error}")
        return []
    return [json.loads(done.stdout.splitlines()[-1])]


if __name__ == "__main__":
    main(measure, __doc__, 3)
