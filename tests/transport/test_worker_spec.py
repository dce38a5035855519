"""A worker's spec arrives as it was sent, and its rank's variables are those of torchrun."""

import os
import subprocess
import sys
from dataclasses import replace

from accelerate_nb.transport.channel import encode
from accelerate_nb.transport.messages import BeginWorker
from accelerate_nb.transport.worker_spec import (
    LocalWorker,
    NetworkAddress,
    RankInfo,
    WorkerDescriptors,
    WorkerSpec,
    current_environment,
)
from tests.processes import python

INFO = RankInfo(5, 8, 1, 4, NetworkAddress("10.0.0.1", 12345), "abc", 1, 2)


def test_the_environment_is_taken_over_as_it_was(tmp_path):
    program = (
        "import os, sys\n"
        "from accelerate_nb.transport.channel import decode\n"
        "decode(sys.stdin.buffer.read()).worker.spec.process_environment.take_over()\n"
        "import multiprocessing\n"
        "print(os.environb[b'MORE'], os.environ.get('OF_THE_PARENT'), os.getcwd(), sys.path[-1], sys.argv,\n"
        "      multiprocessing.current_process().authkey == bytes.fromhex(sys.argv[1]))\n"
    )
    around = current_environment({"MORE": "grüße \udcff\n"}, threads=3)
    path = (*around.path, "/last")
    taken = replace(around, folder=str(tmp_path), path=path, argv=("x", around.authkey), threads=1)
    started = LocalWorker(WorkerSpec(INFO, taken), WorkerDescriptors(3, 4, 5, 6, 7))
    printed = subprocess.run(
        [sys.executable, "-c", program],
        input=encode(BeginWorker(started)),
        capture_output=True,
        check=True,
        timeout=60,
        env={"OF_THE_PARENT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ).stdout.decode()
    expected = ["grüße ".encode() + b"\xff\n", None, tmp_path, "/last", ["x", around.authkey], True]
    assert printed.strip() == " ".join(map(str, expected))


def test_a_folder_that_is_gone_is_no_hindrance(tmp_path):
    folder, environ, path, argv = os.getcwd(), dict(os.environ), list(sys.path), list(sys.argv)
    around = current_environment({}, None)
    gone = replace(around, folder=str(tmp_path / "gone"))
    gone.take_over()
    assert (os.getcwd(), dict(os.environ), sys.path, sys.argv) == (folder, environ, path, argv)


def test_a_rank_has_the_variables_that_torchrun_sets():
    words = ("--standalone", "--no-python", "--nproc-per-node=2", "--max-restarts=3", "--local-ranks-filter=1")
    printed = python("-m", "torch.distributed.run", *words, "env", limit=100, check=True).stdout
    theirs = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
    master = NetworkAddress(theirs["MASTER_ADDR"], int(theirs["MASTER_PORT"]))
    ours = RankInfo(1, 2, 1, 2, master, theirs["TORCHELASTIC_RUN_ID"], max_restarts=3).environ()
    prefixes = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "RANK", "LOCAL_", "WORLD_")
    unoffered = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    assert ours == {name: text for name, text in theirs.items() if name.startswith(prefixes) and name not in unoffered}
