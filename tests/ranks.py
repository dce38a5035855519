"""Real ranks for tests: a function of a test module runs on several processes, each knowing its place as torchrun tells it."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

# Two ranks show what a change breaks; one alone and three, which divide and round otherwise, are left to `make test-all`.
ONE_OR_TWO = [pytest.param(1, marks=pytest.mark.slow), 2]
TWO_OR_THREE = [2, pytest.param(3, marks=pytest.mark.slow)]

LIMIT = 60.0
# How long a rank that lost another may take to say so, once one has failed.
LAST_WORDS = 3.0

# The server that forks the ranks has these loaded already, so that a rank starts in milliseconds.
_LOADED = [
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",  # the first optimizer imports it, which takes a second
    "pytest",
    "accelerate",
    "accelerate_nb.runtime.accelerator.accelerator",
    # where they are installed, several seconds
    "accelerate_nb.runtime.strategies.megatron.strategy",
    "megatron.core.models.gpt",
]
# Where a collected test has loaded the first of them, too: a rank alone takes a second and a half for them.
_LOADED_OF_TRANSFORMERS = ["transformers", "transformers.models.llama.modeling_llama"]


class RanksFailed(AssertionError):
    """Some ranks raised, died or hung; the message holds what each of them said."""


@dataclass
class _Rank:
    """One process of a run, as the test sees it."""

    number: int
    process: ForkServerProcess
    pipe: Connection
    stacks: Path
    result: Any = None
    complaint: str | None = None
    has_reply: bool = False

    def listen(self) -> None:
        """Take what the process sent, or how it died."""
        self.has_reply = True
        try:
            succeeded, reply = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(LAST_WORDS)
            self.complaint = f"died without a word, exit code {self.process.exitcode}"
            return
        if succeeded:
            self.result = reply
        else:
            self.complaint = reply

    def report_hang(self) -> None:
        """Make a complaint of the stacks of a process that has not answered."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
        limit = time.monotonic() + 5
        stacks, same = "", 0
        # faulthandler writes piece by piece, and a busy machine may pause it in between
        while same < 6 and self.process.is_alive() and time.monotonic() < limit:
            self.process.join(0.05)
            now = self.stacks.read_text()
            same = same + 1 if now and now == stacks else 0
            stacks = now
        self.complaint = f"did not answer; its stacks:\n{stacks}"


def run_on_ranks(function: Callable[..., Any], world_size: int = 2, *args: Any, limit: float = LIMIT) -> list[Any]:
    """
    What `function(*args)` returns on each of `world_size` new processes, in the order of their ranks.

    The function stands at the top level of its module, and its arguments and results can be pickled. `RanksFailed` is raised
    with every rank's traceback if one raises or dies, or if one has not returned after `limit` seconds (then with its stacks).
    """
    with _started(function, world_size, args) as ranks:
        _collect(ranks, limit)
        complaints = [f"--- rank {rank.number}: {rank.complaint}" for rank in ranks if rank.complaint is not None]
        if complaints:
            raise RanksFailed(f"{function.__qualname__} on {world_size} ranks:\n" + "\n".join(complaints))
        return [rank.result for rank in ranks]


def _collect(ranks: list[_Rank], limit: float) -> None:
    end = time.monotonic() + limit
    silent = {rank.pipe: rank for rank in ranks}
    while silent:
        ready = wait(list(silent), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = silent.pop(pipe)  # type: ignore[call-overload]  # what waits is what was given
            rank.listen()
            if rank.complaint is not None:
                end = min(end, time.monotonic() + LAST_WORDS)
    for rank in silent.values():
        rank.report_hang()


@contextmanager
def _started(function: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> Iterator[list[_Rank]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED + (_LOADED_OF_TRANSFORMERS if "transformers" in sys.modules else []))
    # the store is the test's own, so no rank has to find a free port, and none can be taken in between
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(world_size):
                test_end, rank_end = context.Pipe()
                stacks = Path(folder, f"{number}.stacks")
                stacks.touch()
                environment = {**os.environ, **rank_variables(number, world_size, store.port)}
                process = context.Process(
                    target=_work, args=(rank_end, function, args, environment, str(stacks)), name=f"rank {number}"
                )
                process.start()
                rank_end.close()
                ranks.append(_Rank(number, process, test_end, stacks))
            yield ranks
        finally:
            for rank in ranks:
                rank.pipe.close()  # they may go now
            for rank in ranks:
                if rank.has_reply:
                    rank.process.join(LAST_WORDS)
                rank.process.kill()
                rank.process.join()


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _work(
    pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], stacks: str
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    # a look for garbage among all that was loaded would copy its memory from the server, too
    gc.freeze()
    if "fork" in multiprocessing.get_all_start_methods():
        # what a rank starts itself, a loader's workers, begins as in a process that no server has forked
        multiprocessing.set_start_method("fork", force=True)
    with open(stacks, "w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            pipe.send_bytes(pickle.dumps((True, function(*args))))
            with suppress(EOFError):
                pipe.recv_bytes()  # nobody leaves while another rank may still speak to it
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.stdout.flush()
        sys.stderr.flush()
        # a process group's destructor may wait for ever for threads of a model that is still alive
        os._exit(0)
