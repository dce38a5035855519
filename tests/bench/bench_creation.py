"""What creating an `Accelerator` costs: ours and Hugging Face's side by side, the first in a process and the following ones."""

import statistics
from functools import partial
from importlib import import_module

import torch.distributed as dist

from accelerate_nb.reports.text_format import counted
from tests.bench.rows import Row, compared, in_turns, main, timed
from tests.ranks import run_on_ranks

FOLLOWING = 50


def measure(processes: int, rounds: int) -> list[Row]:
    """Each round starts new processes for either package; rank 0 tells the times."""
    taken = in_turns(
        {
            name: lambda name=name: run_on_ranks(created, processes, name)[0]  # type: ignore[misc]  # bound now
            for name in ("accelerate_nb", "accelerate")
        },
        rounds,
    )
    rows = []
    for number, which in enumerate(("the first", "a following one")):
        found = {name: [times[number] for times in several] for name, several in taken.items()}
        what = f"{counted(processes, 'rank')}, {which}: {{}}"
        rows += compared(found, "accelerate", "µs", what, 1e6)
        rows += [Row(f"  fastest: {name}", 1e6 * min(times), "µs") for name, times in found.items()]
    return rows


def created(package: str) -> tuple[float, float]:
    """The seconds of the first `Accelerator`, which connects the processes, and of those that followed, in the middle."""
    create = partial(import_module(package).Accelerator, cpu=True)
    first = timed(create)
    if dist.is_initialized():
        dist.barrier()
    return first, statistics.median(timed(create) for _ in range(FOLLOWING))


if __name__ == "__main__":
    main(lambda given: [row for size in (1, 2) for row in measure(size, given.rounds)], __doc__, 15, decimals=1)
