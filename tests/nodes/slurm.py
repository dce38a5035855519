"""A SLURM of this machine: a controller and some nodes, made for some tests and removed after them."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CONFIG = """
ClusterName=tests
SlurmctldHost={host}
GresTypes=gpu
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
ReturnToService=2
MpiDefault=none
KillWait=5
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
_PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "salloc": "slurm-wlm"}


@contextmanager
def made_slurm(count: int, folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which the commands of a SLURM with nodes `node1`, `node2`, ... work; skipped where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons need root here")
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt install {package}")
    for name in ("state", "munge", *(f"spool.node{index}" for index in range(1, count + 1))):
        (folder / name).mkdir(mode=0o700 if name == "munge" else 0o755)
    # munge refuses a socket below a folder that others may write to
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    port = 16000 + os.getpid() % 900
    text = _CONFIG.format(host=socket.gethostname(), port=port, folder=folder)
    for index in range(1, count + 1):
        text += f"NodeName=node{index} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port + 1000 * index} CPUs=2 RealMemory=2000 Gres=gpu:2\n"
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [
        ["munged", "--foreground", "--force", *(f"--{name}={folder}/munge/{file}" for name, file in _MUNGE.items())],
        ["slurmctld", "-D", "-f", str(folder / "slurm.conf")],
        *(["slurmd", "-D", "-N", f"node{index}", "-f", str(folder / "slurm.conf")] for index in range(1, count + 1)),
    ]
    log = (folder / "daemons.log").open("ab")
    running: list[subprocess.Popen[bytes]] = []
    try:
        for words in daemons:
            running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True))
            if words[0] == "munged":
                _until((folder / "munge" / "socket").exists)
        _until(lambda: idle_nodes(environment) == count)
        yield environment
    finally:
        for daemon in reversed(running):
            daemon.terminate()
        for daemon in running:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        log.close()


def idle_nodes(environment: dict[str, str]) -> int:
    """The number of nodes on which nothing runs, or still ends."""
    words = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20, check=False)
    return len(found.stdout.split()) if found.returncode == 0 else 0


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            pytest.skip("SLURM's daemons don't come up here; their log is daemons.log")
        time.sleep(0.05)
