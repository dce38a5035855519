"""What a detached run costs: its launch beside one that ends with the notebook, and the way back to a run of a day."""

import argparse
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

from accelerate_nb import attach, launch
from accelerate_nb.events.event_types import Metric
from accelerate_nb.events.run_folder import RunRecorder
from tests.bench.rows import Row, main

LINES = 50_000  # of each of two ranks
SECONDS = 86_400  # a day, with a number of each name every second
NAMES = ("loss", "learning_rate", "accuracy")


def measure(arguments: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        attached = [launching(folder, detach=False) for _ in range(arguments.rounds)]
        detached = [launching(folder, detach=True) for _ in range(arguments.rounds)]
        back = [attaching(a_day(Path(folder, f"2026-01-01_00000{number}_day"))) for number in range(3)]
    usual, middle = statistics.median(attached[1:]), statistics.median(detached[1:])
    return [
        Row("launch to the first line on 2 ranks", usual, "s"),
        Row("the same, detached", middle, "s", middle / usual, "a launch that ends with the notebook"),
        Row(f"attach to {2 * LINES:,} lines and {SECONDS * len(NAMES):,} numbers", statistics.median(back), "s"),
    ]


def launching(folder: str, *, detach: bool) -> float:
    """The seconds until each rank's function has begun."""
    began = time.time()
    run = launch(
        time.time, num_processes=2, cpu=True, config_file="", panel="off", folder=folder, detach=detach, results="all"
    )
    return float(max(run.wait(60))) - began


def a_day(folder: Path) -> Path:
    """The folder of a run that has written and logged all day."""
    with closing(RunRecorder(folder)) as record:
        for rank in range(2):
            record.output(rank, b"".join(b"step %d of rank %d: loss 0.1234\n" % (line, rank) for line in range(LINES)))
        for second in range(SECONDS):
            for name in NAMES:
                record.event(Metric(0, name, 1 / (second + 1), second, float(second)))
        record.status(name="day", why="", state="finished", started=0.0, ended=1.0, ranks=2, detached=True)
    return folder


def attaching(folder: Path) -> float:
    """The seconds until all that is kept of a run is there."""
    began = time.perf_counter()
    run = attach(folder, panel=False)
    assert run.view.line_count == 2 * LINES
    return time.perf_counter() - began


if __name__ == "__main__":
    main(measure, __doc__, 10, decimals=3)
