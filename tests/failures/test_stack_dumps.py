"""What ranks answer when asked where they are becomes stacks, and a rank that is elsewhere is marked."""

import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from accelerate_nb.failures import stack_dumps
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.memory_file import memory_file

DUMP = """Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000001 (most recent call first):
  File "/home/me/train.py", line 12 in all_reduce
  File "/home/me/with "quotes".py", line ??? in train
  File "/home/me/train.py", line 20 in <module>
"""
OTHER = DUMP.replace("line 12 in all_reduce", "line 15 in evaluate")
NOWHERE = CellSources({}, {})


def test_the_main_thread_s_frames_come_outermost_first():
    frames = stack_dumps.main_thread(DUMP)
    assert [(frame.filename, frame.lineno, frame.name) for frame in frames] == [
        ("/home/me/train.py", 20, "<module>"),
        ('/home/me/with "quotes".py', 0, "train"),
        ("/home/me/train.py", 12, "all_reduce"),
    ]
    assert stack_dumps.main_thread("") == []
    assert stack_dumps.main_thread('  File "cut in the mid') == []


def test_the_state_of_a_process_that_can_t_answer_is_known():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert stack_dumps.process_state(process.pid) == stack_dumps.process_state(None) == ""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert stack_dumps.process_state(process.pid).startswith(f"its process {process.pid} is stopped, by SIGSTOP")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert "a zombie" in stack_dumps.process_state(process.pid)
    process.communicate()
    assert stack_dumps.process_state(process.pid) == ""


def test_what_this_python_writes_is_understood(tmp_path):
    ready, done = threading.Event(), threading.Event()

    def elsewhere():
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    ready.wait(10)
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        frames = stack_dumps.main_thread(file.read())
    done.set()
    thread.join()
    assert frames[-1].name == "test_what_this_python_writes_is_understood"
    assert frames[-1].line == "faulthandler.dump_traceback(file, all_threads=True)"
    assert "elsewhere" not in {frame.name for frame in frames}


def test_a_thread_that_faulthandler_leaves_out_is_reported_in_its_words():
    frames = stack_dumps.main_thread(stack_dumps.as_faulthandler(sys._getframe()))
    assert frames[-1].name == "test_a_thread_that_faulthandler_leaves_out_is_reported_in_its_words"
    assert len(frames) > 1
    assert stack_dumps.main_thread(stack_dumps.as_faulthandler(None)) == []
    # as many as faulthandler writes, and one without a line
    frame = SimpleNamespace(f_code=SimpleNamespace(co_filename="made.py", co_name="made"), f_lineno=None, f_back=None)
    frame.f_back = frame
    frames = stack_dumps.main_thread(stack_dumps.as_faulthandler(frame))
    assert {(frame.filename, frame.lineno) for frame in frames} == {("made.py", 0)}
    assert len(frames) == 100


@pytest.mark.parametrize(
    ("texts", "odd"),
    [
        ([DUMP, DUMP, OTHER], {2}),
        ([OTHER, DUMP, DUMP, ""], {0, 3}),
        *((texts, set()) for texts in ([DUMP, OTHER], [DUMP, DUMP], [DUMP], [])),
    ],
)
def test_ranks_that_are_elsewhere_than_most_are_marked(texts, odd):
    text = stack_dumps.stacks_text(dict(enumerate(texts)), NOWHERE)
    assert set(map(int, re.findall(r"rank (\d):   ◀ elsewhere than the others", text))) == odd


def test_every_rank_is_shown_and_one_that_does_not_answer_too():
    text = stack_dumps.stacks_text({0: DUMP, 2: OTHER, 3: DUMP, 5: ""}, NOWHERE)
    assert text.index("rank 0:\n") < text.index("rank 2:   ◀ elsewhere than the others\n") < text.index("rank 5:")
    assert 'File "/home/me/train.py", line 15, in evaluate' in text
    assert text.endswith("(it did not answer)")


@pytest.fixture
def files():
    """Two files in memory, each with a descriptor."""
    made = [memory_file("a"), memory_file("b")]
    yield made
    for file in made:
        os.close(file)


def test_only_what_was_written_since_the_question_is_the_answer(files):
    os.write(files[0], b"old")
    before = stack_dumps.lengths(files)
    assert before == [3, 0]
    os.write(files[0], b"new 0")
    os.write(files[1], b"new 1")
    assert stack_dumps.dumps_since(files, before) == ["new 0", "new 1"]
    assert stack_dumps.dumps_since(files, stack_dumps.lengths(files)) == ["", ""]


def test_a_fault_of_compiled_code_shows_where_the_process_was_and_requested_stacks_are_none(files) -> None:
    """The function above it calls into C, and C never comes back."""
    os.write(files[1], DUMP.encode())
    assert stack_dumps.crash_text(stack_dumps.crash_dump(files[1]), NOWHERE) == ""
    file = files[0]
    os.write(file, DUMP.encode() * 4000)
    child = subprocess.Popen(
        [sys.executable, "-c", f"import ctypes, faulthandler\nfaulthandler.enable({file})\nctypes.string_at(0)"],
        pass_fds=[file],
    )
    assert child.wait(30) == -signal.SIGSEGV
    sources = CellSources({"<string>": ["import ctypes\n"]}, {"<string>": 3})
    assert "Cell In[3], line 3, in <module>" in stack_dumps.crash_text(stack_dumps.crash_dump(file), sources)
