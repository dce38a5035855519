"""Whatever befalls a detached run, no process, no socket and no line is lost, and its end is recorded as it was."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from accelerate_nb import runs
from tests.launching.detached.faults import FAULTS, the_disk_is_full, the_disk_is_full_at_the_start
from tests.launching.detached.trainings import host_of


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_run_stands_the_fault(fault, tmp_path: Path) -> None:
    if fault in {the_disk_is_full, the_disk_is_full_at_the_start} and os.getuid() != 0:
        pytest.skip("only root can mount a disk of its own")
    try:
        fault(tmp_path, random.Random(0))
    except subprocess.CalledProcessError as error:
        if error.cmd[0] != "mount":
            raise
        pytest.skip("no disk can be mounted here")
    finally:
        for kept in runs(tmp_path):
            if not kept.is_over:
                host_of(kept.folder).kill()
