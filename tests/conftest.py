"""What every test finds: the same environment, whatever the shell that started pytest had set."""

from __future__ import annotations

import os

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
