"""What programs really write is marked by what it means, whatever stream it came on."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from textwrap import dedent

import pytest
from tqdm import tqdm

from accelerate_nb.events.line_reader import LineClassifier

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
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False, timeout=60)
    return done.stderr


@pytest.mark.parametrize("level", LOGGED)
@pytest.mark.parametrize("format", FORMATS)
def test_a_logger_s_line_has_the_meaning_of_its_level(format, level):
    record = logging.LogRecord(
        "my.module",
        getattr(logging, level.upper()),
        "train.py",
        3,
        "The file has no ERROR nor WARNING: 3",
        (),
        None,
        "f",
    )
    assert meanings(logging.Formatter(format).format(record)) == [LOGGED[level]]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        # absl, glog, torch
        ("W0101 12:00:00.123456 140225 run.py:793] Setting OMP_NUM_THREADS", "warning"),
        ("E0101 12:00:00.123456   140225 api.py:869] failed (exitcode: 1)", "error"),
        ("F0101 12:00:00.123456 140225 check.cc:12] Check failed: x == y", "error"),
        ("I0101 12:00:00.123456 140225 train.py:12] step 3, no ERROR: 0", ""),
        (
            "[rank0]:[W1122 13:01:59.947690951 reducer.cpp:1529] Warning: find_unused_parameters=True was specified",
            "warning",
        ),
        (
            "[rank3]:[E1122 13:01:59.947690951 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout",
            "error",
        ),
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
        ("error 0.25, mean error: 0.3", ""),
        ("Error: 0.25", ""),
        ("ERROR RATE: 0.03", ""),
        ("the model made an ERROR in 3 of 10", ""),
        ("no warnings so far", ""),
        ("step 3 [loss 0.25] done", ""),
        ("Warmup: 3 steps", ""),
        ("[3, 4] and [5, 6] ", ""),
        ("Epoch 1: loss 0.3 - WARNING level not reached", ""),
        ("  File this under results", ""),
    ],
)
def test_a_line_has_the_meaning_of_its_writer(text, meaning):
    assert meanings(text) == [meaning]


def test_a_python_warning_is_one_with_its_source_line():
    text = written("""
    import sys, warnings
    warnings.warn("slow")
    print("and on", file=sys.stderr)
    """)
    assert meanings(text)[0] == "warning"
    assert meanings("/home/me/train.py:3: UserWarning: slow\n  warnings.warn('slow')\n  more\nstep") == [
        "warning",
        "warning",
        "",
        "",
    ]
    assert meanings(text)[-1] == ""
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
