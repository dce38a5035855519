"""What a worker is told arrives as it was said, and its seat is torchrun's contract."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from accelerate_nb.launching.order import Descriptors, Order, as_text, numbered, of_text, surroundings_here
from accelerate_nb.launching.seat import Seat

ORDER = Order(
    seat=Seat(rank=1, size=4, port=12345, run="abc", attempt=2, max_restarts=3),
    surroundings=surroundings_here({"MORE": "grüße \udcff\n"}, threads=3),
    descriptors=Descriptors(3, 4, 5, 6, 7, payload=8, store=-1, more=(9, 10)),
)


def test_an_order_survives_its_line():
    text = ORDER.to_json()
    assert text.isascii()
    assert "\n" not in text
    assert Order.from_json(text) == ORDER


def test_the_orders_of_a_process_arrive_together_each_with_its_own_descriptors():
    other = replace(ORDER, descriptors=Descriptors(30, 31, 32, 33, 34, store=35), through_xla=True)
    text = as_text([ORDER, other])
    assert "\n" not in text
    assert of_text(text) == [ORDER, other]
    arrived = of_text(text, range(100, 114))
    assert arrived[0].descriptors == Descriptors(100, 101, 102, 103, 104, payload=105, store=-1, more=(106, 107))
    assert arrived[1].descriptors == Descriptors(108, 109, 110, 111, 112, payload=-1, store=113)


def test_ranks_that_share_a_process_know_which_it_is():
    seats = [replace(ORDER.seat, rank=rank, size=5, per_process=2) for rank in range(5)]
    assert [(seat.process, seat.processes) for seat in seats] == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3)]


def test_surroundings_are_taken_over_as_they_were(tmp_path):
    program = (
        "import os, sys\n"
        "from accelerate_nb.launching.order import Order\n"
        "Order.from_json(sys.stdin.read()).surroundings.take_over()\n"
        "import multiprocessing\n"
        "print(os.environb[b'MORE'], os.environ.get('OF_THE_PARENT'), os.getcwd(), sys.path[-1], sys.argv,\n"
        "      multiprocessing.current_process().authkey == bytes.fromhex(sys.argv[1]))\n"
    )
    around = Order.from_json(ORDER.to_json()).surroundings
    order = Order(
        ORDER.seat,
        type(around)(around.environ, str(tmp_path), (*around.path, "/last"), ("x", around.authkey), around.authkey, 1),
        ORDER.descriptors,
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        input=order.to_json(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"OF_THE_PARENT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ).stdout
    expected = ["grüße ".encode() + b"\xff\n", None, tmp_path, "/last", ["x", around.authkey], True]
    assert said.strip() == " ".join(map(str, expected))


def test_a_folder_that_is_gone_is_no_hindrance(tmp_path):
    here, environ, path, argv = os.getcwd(), dict(os.environ), list(sys.path), list(sys.argv)
    around = surroundings_here({}, None)
    gone = type(around)(around.environ, str(tmp_path / "gone"), around.path, around.argv, around.authkey, None)
    gone.take_over()
    assert (os.getcwd(), dict(os.environ), sys.path, sys.argv) == (here, environ, path, argv)


def test_a_seat_tells_what_torchrun_tells():
    said = ORDER.seat.environ()
    assert (said["RANK"], said["LOCAL_RANK"], said["WORLD_SIZE"], said["LOCAL_WORLD_SIZE"]) == ("1", "1", "4", "4")
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("127.0.0.1", "12345")
    assert (said["TORCHELASTIC_RESTART_COUNT"], said["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "3")
    assert said["TORCHELASTIC_RUN_ID"] == "abc"


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
        one for one in theirs if one.startswith(("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "WORLD_"))
    }
    assert wanted - {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"} <= set(ORDER.seat.environ())


def test_descriptors_are_numbered_anew_in_the_order_in_which_they_travel():
    assert ORDER.descriptors.all() == (3, 4, 5, 6, 7, 8, 9, 10)
    found = numbered(ORDER.descriptors, [30, 40, 50, 60, 70, 80, 90, 100])
    assert found == Descriptors(30, 40, 50, 60, 70, payload=80, store=-1, more=(90, 100))
    assert numbered(Descriptors(3, 4, 5, 6, 7), [1, 2, 3, 4, 5]) == Descriptors(1, 2, 3, 4, 5)
