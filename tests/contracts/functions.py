"""What the engines run in their contract: functions of a module that a worker can import."""

import ctypes
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

LARGE = 3_000_000  # elements: more than a pipe or a message holds


def facts(*args, **kwargs):
    """What a worker finds around itself, before it has done anything."""
    drawn = random.random(), float(np.random.rand()), torch.rand(3).tolist()
    print("début", rank())
    for number in range(200):
        print("line", number, end="\n" if number % 2 else "\r\n")
    os.write(1, b"from C\n")
    print("no newline at the end", end="", file=sys.stderr)
    return {
        "args": args,
        "kwargs": kwargs,
        "environment": dict(os.environ),
        "drawn": drawn,
        "torch": torch_settings(),
        "process": process_settings(),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "thread": threading.current_thread() is threading.main_thread(),
        "session": os.getsid(0),
        "pid": os.getpid(),
    }


def process_settings():
    """What a notebook sets of its process: a filter of warnings, how NumPy prints, limits."""
    os.umask(umask := os.umask(0o77))
    is_ignored = any(item[0] == "ignore" and getattr(item[1], "pattern", "") == "noise" for item in warnings.filters)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return is_ignored, np.get_printoptions()["precision"], umask, files, os.sched_getaffinity(0)


def torch_settings():
    """What changes the numbers that torch computes."""
    cudnn = torch.backends.cudnn
    return (
        str(torch.get_default_dtype()),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        torch.get_float32_matmul_precision(),
        (cudnn.benchmark, cudnn.deterministic),
    )


def rank():
    return int(os.environ.get("RANK", "0"))


def meets_others():
    dist.init_process_group("gloo")
    value = torch.full((4,), float(dist.get_rank() + 1))
    dist.all_reduce(value)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"rank {dist.get_rank()}")
    dist.destroy_process_group()
    return value.tolist(), names


def tensors():
    base = torch.arange(LARGE, dtype=torch.float32)
    return {"base": base, "view": base[10:20], "rank": rank(), "array": np.arange(12.0).reshape(3, 4).T}


def raises(error, on_rank):
    if rank() == on_rank:
        raise error
    signal.pause()


def loses_connection(closes_first):
    """One rank fails while the other waits for it in a collective, and fails of that; it may close its connections before."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        try:
            raise LookupError("the cause")
        finally:
            if closes_first:
                dist.destroy_process_group()
                time.sleep(0.5)
    dist.all_reduce(torch.ones(1))


def dies(how):
    print("last words", flush=True)
    if rank() != int(os.environ.get("WORLD_SIZE", "1")) - 1:
        signal.pause()
    match how:
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)


def leaves_early(code):
    sys.exit(code)


def waits(folder):
    """Say that one is here, and wait to be ended."""
    Path(folder, f"here_{rank()}").touch()
    threading.Event().wait(60)


def waits_stubbornly(folder):
    """The same, deaf to interrupts."""
    if threading.current_thread() is threading.main_thread():
        # what waits in another thread hears of no signal anyway
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(folder, f"here_{rank()}").touch()
    while True:
        time.sleep(60)


def is_killed_among_deaf_ones(folder):
    """The last rank is killed once the others are there, which no interrupt ends."""
    last = int(os.environ["WORLD_SIZE"]) - 1
    if rank() != last:
        waits_stubbornly(folder)
    while len(list(Path(folder).glob("here_*"))) < last:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def is_stuck_here():
    threading.Event().wait(60)


def fails_the_first_time(folder):
    count = Path(folder, f"attempts_{rank()}")
    attempt = len(count.read_text()) if count.exists() else 0
    count.write_text("x" * (attempt + 1))
    if attempt == 0 and rank() == 0:
        # a rank that has not begun when another fails is ended before it has counted anything
        others = [Path(folder, f"attempts_{other}") for other in range(1, int(os.environ.get("WORLD_SIZE", "1")))]
        while not all(other.exists() for other in others):
            time.sleep(0.01)
        raise ConnectionResetError("not yet")
    if attempt == 0:
        signal.pause()
    return attempt, os.environ.get("TORCHELASTIC_RESTART_COUNT")


def writes_into(tensor, array):
    before = float(tensor[0]), float(array[0])
    tensor.fill_(rank() + 1)
    array.fill(rank() + 1)
    after = float(tensor.mean()), float(array.mean())
    return before, after


def computes_in_parallel():
    """Enough work that torch uses all threads it has."""
    weight = torch.ones(600, 600, requires_grad=True)
    (weight @ weight).sum().backward()
    return torch.get_num_threads(), float(weight.grad[0, 0])


def saves_in_the_background(folder, goes_wrong):
    from accelerate_nb import Accelerator
    from accelerate_nb.runtime.checkpoints.saver import BackgroundWrite

    writes = BackgroundWrite._run

    def slowly(writing, work):
        threading.Event().wait(0 if goes_wrong else 3)  # longer than a worker waits for what is registered for its end
        writes(writing, Path(folder, "no such folder", "file").touch if goes_wrong else work)

    BackgroundWrite._run = slowly
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(2, 2))
    try:
        accelerator.save_state(folder, blocking=False)
    finally:
        BackgroundWrite._run = writes  # an inline function runs in the tests' own process
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def floods(lines):
    for number in range(lines):
        print("flood", number)


def returns_a_lock():
    return {"loss": 1.0, "lock": threading.Lock()}


def tells_its_process(folder):
    """Write the number of one's process, and go on for ever."""
    Path(folder, f"pid_{rank()}").write_text(str(os.getpid()))
    while True:
        time.sleep(60)
