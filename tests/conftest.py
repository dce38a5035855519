"""What every test finds: the same environment, whatever the shell that started pytest had set."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

# Variables that a launcher sets in its workers, and that would make a test believe to be one of them.
OF_A_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "MIXED_PRECISION",
)


@pytest.fixture(scope="session", autouse=True)
def _an_environment_of_our_own() -> None:
    for name in [*OF_A_LAUNCHER, *(name for name in os.environ if name.startswith("ACCELERATE_"))]:
        os.environ.pop(name, None)
    # kernels and scripts that tests start import this checkout, wherever they run, installed or not
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # a job that a script starts in the background ignores interrupts, and hands that on to all that it starts
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _what_is_loaded_is_no_garbage() -> None:
    """
    What code under test collects as garbage, often several times a test, is looked for in what came since the file began.

    Half a second is what a look through all of torch takes, and Accelerate takes one for every file that it loads.
    """
    gc.collect()
    gc.freeze()
