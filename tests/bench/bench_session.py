"""How long an empty cell takes on two ranks of a session, beside the peers that are installed (ipyparallel)."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from accelerate_nb.config.run import resolve
from accelerate_nb.launching.session import Session

CELLS = 200

IPYPARALLEL = """
import statistics, sys, time
import ipyparallel
with ipyparallel.Cluster(n=2, log_level=50) as clients:
    view = clients[:]
    times = []
    for _ in range(int(sys.argv[1])):
        began = time.perf_counter()
        view.execute("", block=True)
        times.append(time.perf_counter() - began)
print(statistics.median(times))
"""


def ours() -> float:
    """The median of a session's round trips, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session.start(resolve({"num_processes": 2, "cpu": True, "folder": folder}, {}))
        times = timed(lambda: session.run("").wait())
        session.close()
    return statistics.median(times)


def timed(do: Callable[[], object]) -> list[float]:
    """How long each of many goes takes."""
    times = []
    for _ in range(CELLS):
        began = time.perf_counter()
        do()
        times.append(time.perf_counter() - began)
    return times


def peer(name: str, program: str) -> float | None:
    """The median of a peer's round trips, in seconds; `None` where it isn't installed."""
    if importlib.util.find_spec(name) is None:
        return None
    done = subprocess.run(
        [sys.executable, "-c", program, str(CELLS)], capture_output=True, text=True, timeout=180, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    """Print all medians, and the ratios to ours."""
    own = ours()
    print(f"{'accelerate_nb':16} {own * 1e3:7.2f} ms")
    theirs = peer("ipyparallel", IPYPARALLEL)
    if theirs is None:
        print("ipyparallel is not installed: pip install ipyparallel")
    else:
        print(f"{'ipyparallel':16} {theirs * 1e3:7.2f} ms   {theirs / own:.1f} times ours")


if __name__ == "__main__":
    main()
