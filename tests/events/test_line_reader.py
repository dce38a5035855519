"""Bytes become the same whole lines, however they are cut on their way, and are marked by what they mean."""

import io
import logging
import random
import subprocess
import sys
import time

import pytest
from tqdm import tqdm

from accelerate_nb.events.line_reader import LONGEST_SHOWN, LineAssembler, LineClassifier, OutputLine, shown
from tests.processes import python

# Streams with the lines of them that a terminal would show, where it would show what they hold.
STREAMS = {
    "plain": (b"one\ntwo\nthree\n", ["one", "two", "three"]),
    "no final newline": (b"one\ntwo", ["one", "two"]),
    "nothing": (b"", []),
    "empty lines": (b"\n\na\n\n", ["", "", "a", ""]),
    "windows line ends": (b"one\r\ntwo\r\n\r\n", ["one", "two", ""]),
    "progress bar": (b"\r  0%|   |\r 50%|## |\r100%|###|\ndone\n", ["100%|###|", "done"]),
    "a bar that ends with a carriage return": (b"10%\r20%\r30%\r\n", ["30%"]),
    "a bar that never ends": (b"10%\r20%", ["20%"]),
    "no text at all": (bytes(range(256)) * 3 + b"\n" + b"\xff\xfe\n", None),
    "letters of several bytes": ("grüße 😀 日本\n".encode() * 5, ["grüße 😀 日本"] * 5),
    "long": (b"x" * 40_000 + b"\n" + b"y" * 10, None),
}


def assembled(pieces):
    """The raw bytes and the whole lines of a stream that comes in these pieces."""
    assembler = LineAssembler()
    raw, lines = b"", []
    for piece in pieces:
        more, news = assembler.feed(piece)
        assert more == b"" or more.endswith(b"\n")
        raw += more
        lines += news
    more, news = assembler.close()
    return raw + more, [line.text for line in lines + news if not line.open]


def cut(data, seed):
    """The data in random pieces, some of one byte, some empty."""
    dice = random.Random(seed)
    places = sorted(dice.randrange(len(data) + 1) for _ in range(min(len(data), dice.choice([1, 3, 20, 200]))))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize(("data", "expected"), STREAMS.values(), ids=STREAMS)
def test_any_cutting_gives_the_lines_that_a_terminal_would_show_and_loses_no_byte(data, expected):
    raw, lines = assembled([data])
    assert raw == data or raw == data + b"\n"
    assert len(lines) == raw.count(b"\n")
    assert expected in (lines, None)
    for seed in range(60):
        assert assembled(cut(data, seed)) == (raw, lines)


NESTED = """
from tqdm import tqdm
for _ in tqdm(range(3), desc="outer", mininterval=0):
    for _ in tqdm(range(10), desc="inner", position=1, leave=False, mininterval=0):
        pass
"""


def test_what_a_nested_bar_draws_where_nobody_knows_it_is_no_line():
    drawn = subprocess.run([sys.executable, "-c", NESTED], stderr=subprocess.PIPE, check=True, timeout=60).stderr
    raw, texts = assembled([drawn])
    assert raw == drawn
    # the outer bar at each of its steps, and at most what ends the inner ones
    shown = [text for text in texts if text.strip()]
    assert 4 <= len(shown) <= 6, shown
    assert all("outer" in text or "100%" in text for text in shown)


def test_a_warning_of_torch_that_harms_nothing_is_kept_and_not_shown():
    warning = b"[W1126 14:05:44.381323457 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"
    raw, lines = LineAssembler().feed(warning + b"mine: " + warning)
    assert raw == warning + b"mine: " + warning
    assert [line.text[:10] for line in lines] == ["mine: [W11"]


def test_a_very_long_line_is_cut_where_it_is_shown_and_kept_whole():
    raw, (text,) = assembled([b"x" * 100_000 + b"\n"])
    assert len(raw) == 100_001
    assert text == "x" * LONGEST_SHOWN + " … (100,000 bytes)"
    # never inside a letter; bytes that are no text are shown as escapes
    assert "\\x" not in shown("ä".encode() * LONGEST_SHOWN + b"!") + shown(b"!" + "ä".encode() * LONGEST_SHOWN)
    assert shown("ä".encode() + b"\xffb") == r"ä\xffb"


def test_a_progress_bar_is_given_each_time_it_moves_and_once_as_a_line():
    assembler = LineAssembler()
    assert assembler.feed(b"\r10%") == (b"", [OutputLine("10%", open=True)])
    assert assembler.feed(b"\r20%") == (b"", [OutputLine("20%", open=True)])
    assert assembler.feed(b"\r3") == (b"", [OutputLine("3", open=True)])
    assert assembler.feed(b"0%") == (b"", [])
    assert assembler.feed(b" of it\r") == (b"", [OutputLine("30% of it", open=True)])
    assert assembler.feed(b"\nnext") == (b"\r10%\r20%\r30% of it\r\n", [OutputLine("30% of it")])


def test_text_that_waits_for_its_newline_is_held_back():
    assembler = LineAssembler()
    assert assembler.feed(b"step 1") == (b"", [])
    assert assembler.feed(b", loss 2\nst") == (b"step 1, loss 2\n", [OutputLine("step 1, loss 2")])
    assert assembler.close() == (b"st\n", [OutputLine("st")])
    assert assembler.close() == (b"", [])


@pytest.mark.parametrize("prompt", ["name? ", "(Pdb) ", ">>> ", "Ihr Passwort: "])
def test_a_prompt_is_given_before_its_line_ends(prompt):
    assembler = LineAssembler()
    assert assembler.feed(prompt.encode()) == (b"", [OutputLine(prompt, open=True)])
    assert assembler.feed(b"Bob\n") == (f"{prompt}Bob\n".encode(), [OutputLine(f"{prompt}Bob")])


def test_a_bar_that_moves_for_hours_costs_no_more_than_at_its_beginning():
    assembler = LineAssembler()
    bar = b"\r" + b"#" * 150
    begin = time.thread_time()
    for _ in range(40_000):
        assembler.feed(bar)
    # when everything since the last newline is put together each time, this takes half a minute
    assert time.thread_time() - begin < 5
    assert len(assembler.close()[0]) == 40_000 * len(bar) + 1


def test_a_line_of_many_pieces_costs_no_more_than_its_length():
    assembler = LineAssembler()
    begin = time.thread_time()
    for _ in range(4_000):
        assembler.feed(b"\r" + b"x" * 10_000 if _ == 0 else b"x" * 10_000)
    raw, (line,) = assembler.feed(b"\n")
    assert time.thread_time() - begin < 5
    assert len(raw) == 40_000_002
    assert line.text.endswith("(40,000,000 bytes)")


LOGGED = {"debug": "", "info": "", "warning": "warning", "error": "error", "critical": "error"}
FORMATS = [
    logging.BASIC_FORMAT,
    "%(levelname)s %(message)s",
    "%(levelname)s: %(message)s",
    "[%(levelname)s] %(message)s",
    "%(levelname)-8s | %(message)s",
    "%(asctime)s %(levelname)s %(message)s",
    "%(asctime)s %(name)s %(levelname)s %(message)s",
    "%(asctime)s - %(name)s - %(levelname)s - %(message)s",
    "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s",  # hydra
    "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s",  # DeepSpeed
    "%(asctime)s | %(levelname)-8s | %(name)s:%(funcName)s:%(lineno)d - %(message)s",  # loguru
    "%(name)s - %(levelname)s - %(message)s",
    "[%(levelname)s|%(filename)s:%(lineno)d] %(asctime)s >> %(message)s",  # transformers
    "%(levelname)s:%(name)s:%(filename)s: %(message)s",
    "\x1b[31m%(levelname)s\x1b[0m %(message)s",
]


def meanings(text):
    reader = LineClassifier()
    return [reader.of(line) for line in text.splitlines()]


def written(code):
    """What a program writes on its standard error."""
    return python("-c", code).stderr


@pytest.mark.parametrize("level", LOGGED)
@pytest.mark.parametrize("format", FORMATS)
def test_a_logger_s_line_has_the_meaning_of_its_level(format, level):
    number, message = getattr(logging, level.upper()), "The file has no ERROR nor WARNING: 3"
    record = logging.LogRecord("my.module", number, "train.py", 3, message, (), None, "f")
    assert meanings(logging.Formatter(format).format(record)) == [LOGGED[level]]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        # absl, glog, torch
        ("W0101 12:00:00.123456 140225 run.py:793] Setting OMP_NUM_THREADS", "warning"),
        ("E0101 12:00:00.123456   140225 api.py:869] failed (exitcode: 1)", "error"),
        ("F0101 12:00:00.123456 140225 check.cc:12] Check failed: x == y", "error"),
        ("I0101 12:00:00.123456 140225 train.py:12] step 3, no ERROR: 0", ""),
        ("[rank0]:[W1122 13:01:59.947690951 reducer.cpp:1529] Warning: find_unused_parameters=True", "warning"),
        ("[rank3]:[E1122 13:01:59.947690951 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective", "error"),
        ("[W socket.cpp:697] [c10d] The client socket has failed to connect to [localhost]:29500", "warning"),
        ("[E ProcessGroupGloo.cpp:144] Rank 0 successfully reached monitoredBarrier", "error"),
        ("[W1122 13:01:59.947690951 ProcessGroupGloo.cpp:780] Warning: Unable to resolve hostname", "warning"),
        ("[rank0]:W1122 13:01:59.947000 22 torch/_dynamo/convert_frame.py:844] [0/8] hit recompile_limit", "warning"),
        # TensorFlow and XLA
        ("2026-01-01 12:00:00.123456: W external/local_tsl/tsl/framework/bfc_allocator.cc:482] full", "warning"),
        ("2026-01-01 12:00:00.123456: E external/local_xla/xla/stream_executor/cuda_dnn.cc:9261] Unable", "error"),
        ("2026-01-01 12:00:00.123456: I tensorflow/core/util/port.cc:113] oneDNN", ""),
        # gloo and NCCL
        ("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1", ""),
        ("node1:12345:12399 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed", "warning"),
        ("node1:12345:12399 [0] NCCL WARN Cuda failure 'out of memory'", "warning"),
        ("node1:12345:12399 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P", ""),
        ("terminate called after throwing an instance of 'gloo::EnforceNotMet'", "error"),
        ("  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446]", "error"),
        ("Fatal Python error: Segmentation fault", "error"),
        # others
        ("Warning: You are sending unauthenticated requests to the HF Hub.", "warning"),
        ("2026-01-01 12:00:00 [warning  ] could not connect              host=a", "warning"),
        ("2026-01-01T12:00:00Z ERROR upload failed", "error"),
        # what a person prints
        *((text, "") for text in ("error 0.25, mean error: 0.3", "Error: 0.25", "ERROR RATE: 0.03", "Warmup: 3 steps")),
        *((text, "") for text in ("the model made an ERROR in 3 of 10", "no warnings so far", "[3, 4] and [5, 6] ")),
        *((text, "") for text in ("step 3 [loss 0.25] done", "Epoch 1: loss 0.3 - WARNING level not reached")),
        ("  File this under results", ""),
    ],
)
def test_a_line_has_the_meaning_of_its_writer(text, meaning):
    assert meanings(text) == [meaning]


def test_a_python_warning_is_one_with_its_source_line():
    text = written("import sys, warnings\nwarnings.warn('slow')\nprint('and on', file=sys.stderr)")
    assert meanings(text)[0] == "warning"
    assert meanings(text)[-1] == ""
    text = "/home/me/train.py:3: UserWarning: slow\n  warnings.warn('slow')\n  more\nstep"
    assert meanings(text) == ["warning", "warning", "", ""]
    assert meanings("Cell In[3], line 2: FutureWarning: `a` is deprecated") == ["warning"]


@pytest.mark.parametrize(
    "code",
    [
        "def f(): 1 / 0\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('two\\n') from error",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['key']",
        "exec('x = = 3')",
        "class Own(Exception): pass\nraise Own",
        "import threading\nthread = threading.Thread(target=lambda: 1 / 0)\nthread.start()",
        "import faulthandler, os\nfaulthandler.enable()\nos.abort()",
        "raise ExceptionGroup('several', [ValueError('a'), TypeError('b')])",
        "import logging\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.exception('failed')",
    ],
)
def test_all_of_a_traceback_is_an_error_and_nothing_after_it(code):
    lines = [line for line in written(code).splitlines() if line.strip() and not line.startswith("Extension modules")]
    assert len(lines) >= 2
    assert meanings("\n".join([*lines, "goes on", "  indented"])) == ["error"] * len(lines) + ["", ""]
    # as torch writes it where the exception ends a rank
    assert set(meanings("\n".join(f"[rank1]: {line}" for line in lines))) == {"error"}


@pytest.mark.parametrize("given", [{"total": 10}, {"total": 10, "colour": "green"}, {"total": 3, "ascii": True}, {}])
def test_a_finished_bar_is_no_alarm(given):
    with tqdm(file=io.StringIO(), desc="train", **given) as bar:
        bar.update(3)
    assert meanings(str(bar)) == ["bar"]
