"""A session of processes ends as one."""

import signal
import subprocess
import sys

import psutil
import pytest

from accelerate_nb.worker.process_session import kill_sessions, members

# A leader with a child in a process group of its own, and a grandchild; it tells their numbers and waits.
FAMILY = """
import os, signal, subprocess, sys
grandchild = "import time; print('there', flush=True); time.sleep(100)"
child = subprocess.Popen([sys.executable, "-c", grandchild], stdout=subprocess.PIPE, process_group=0)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def family():
    program = FAMILY if sys.version_info >= (3, 11) else FAMILY.replace("process_group=0", "preexec_fn=os.setpgrp")
    leader = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    child = psutil.Process(int(leader.stdout.readline()))
    yield leader, child
    leader.kill()
    leader.wait()
    leader.stdout.close()


def is_gone(process):
    psutil.wait_procs([process], timeout=10)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_killing_a_session_leaves_none_of_it_ends_no_other_and_again_is_no_error(family):
    leader, child = family
    assert sorted(members(leader.pid)) == sorted([leader.pid, child.pid])
    kill_sessions(leader.pid)
    assert leader.wait(10) == -signal.SIGKILL
    assert is_gone(child)
    kill_sessions(leader.pid)


def test_what_a_dead_leader_left_behind_is_killed(family):
    leader, child = family
    leader.kill()
    leader.wait()
    assert members(leader.pid) == [child.pid]
    kill_sessions(leader.pid)
    assert is_gone(child)
