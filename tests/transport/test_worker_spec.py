"""What a worker is told arrives as it was said, and its seat is torchrun's contract."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from accelerate_nb.transport.rank_info import RankInfo
from accelerate_nb.transport.worker_spec import (
    WorkerDescriptors,
    WorkerSpec,
    as_text,
    current_environment,
    numbered,
    of_text,
)

SPEC = WorkerSpec(
    rank_info=RankInfo(rank=1, size=4, port=12345, run="abc", restart_count=2, max_restarts=3),
    process_environment=current_environment({"MORE": "grüße \udcff\n"}, threads=3),
    descriptors=WorkerDescriptors(3, 4, 5, 6, 7, payload=8, store=-1, more=(9, 10)),
)


def test_an_order_survives_its_line():
    text = SPEC.to_json()
    assert text.isascii()
    assert "\n" not in text
    assert WorkerSpec.from_json(text) == SPEC


def test_the_orders_of_a_process_arrive_together_each_with_its_own_descriptors():
    other = replace(SPEC, descriptors=WorkerDescriptors(30, 31, 32, 33, 34, store=35), through_xla=True)
    text = as_text([SPEC, other])
    assert "\n" not in text
    assert of_text(text) == [SPEC, other]
    arrived = of_text(text, range(100, 114))
    assert arrived[0].descriptors == WorkerDescriptors(100, 101, 102, 103, 104, payload=105, store=-1, more=(106, 107))
    assert arrived[1].descriptors == WorkerDescriptors(108, 109, 110, 111, 112, payload=-1, store=113)


def test_ranks_that_share_a_process_know_which_it_is():
    ranks = [replace(SPEC.rank_info, rank=rank, size=5, ranks_per_process=2) for rank in range(5)]
    assert [(rank_info.process, rank_info.processes) for rank_info in ranks] == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3)]


def test_surroundings_are_taken_over_as_they_were(tmp_path):
    program = (
        "import os, sys\n"
        "from accelerate_nb.transport.worker_spec import WorkerSpec\n"
        "WorkerSpec.from_json(sys.stdin.read()).process_environment.take_over()\n"
        "import multiprocessing\n"
        "print(os.environb[b'MORE'], os.environ.get('OF_THE_PARENT'), os.getcwd(), sys.path[-1], sys.argv,\n"
        "      multiprocessing.current_process().authkey == bytes.fromhex(sys.argv[1]))\n"
    )
    around = WorkerSpec.from_json(SPEC.to_json()).process_environment
    spec = WorkerSpec(
        SPEC.rank_info,
        type(around)(around.environ, str(tmp_path), (*around.path, "/last"), ("x", around.authkey), around.authkey, 1),
        SPEC.descriptors,
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        input=spec.to_json(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"OF_THE_PARENT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ).stdout
    expected = ["grüße ".encode() + b"\xff\n", None, tmp_path, "/last", ["x", around.authkey], True]
    assert printed.strip() == " ".join(map(str, expected))


def test_a_folder_that_is_gone_is_no_hindrance(tmp_path):
    folder, environ, path, argv = os.getcwd(), dict(os.environ), list(sys.path), list(sys.argv)
    around = current_environment({}, None)
    gone = type(around)(around.environ, str(tmp_path / "gone"), around.path, around.argv, around.authkey, None)
    gone.take_over()
    assert (os.getcwd(), dict(os.environ), sys.path, sys.argv) == (folder, environ, path, argv)


def test_a_seat_tells_what_torchrun_tells():
    environ_of_rank = SPEC.rank_info.environ()
    assert (
        environ_of_rank["RANK"],
        environ_of_rank["LOCAL_RANK"],
        environ_of_rank["WORLD_SIZE"],
        environ_of_rank["LOCAL_WORLD_SIZE"],
    ) == ("1", "1", "4", "4")
    assert (environ_of_rank["MASTER_ADDR"], environ_of_rank["MASTER_PORT"]) == ("127.0.0.1", "12345")
    assert (environ_of_rank["TORCHELASTIC_RESTART_COUNT"], environ_of_rank["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "3")
    assert environ_of_rank["TORCHELASTIC_RUN_ID"] == "abc"


def test_a_seat_says_every_variable_that_torchrun_sets():
    """Asked of torchrun itself, on one process of one machine."""
    names = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node=1", "env"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout
    theirs = {line.partition("=")[0] for line in names.splitlines()}
    wanted = {
        item for item in theirs if item.startswith(("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "WORLD_"))
    }
    assert wanted - {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"} <= set(SPEC.rank_info.environ())


def test_descriptors_are_numbered_anew_in_the_order_in_which_they_travel():
    assert SPEC.descriptors.all() == (3, 4, 5, 6, 7, 8, 9, 10)
    found = numbered(SPEC.descriptors, [30, 40, 50, 60, 70, 80, 90, 100])
    assert found == WorkerDescriptors(30, 40, 50, 60, 70, payload=80, store=-1, more=(90, 100))
    assert numbered(WorkerDescriptors(3, 4, 5, 6, 7), [1, 2, 3, 4, 5]) == WorkerDescriptors(1, 2, 3, 4, 5)
