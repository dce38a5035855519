"""A signal to the process that owns a run is meant for the run's own processes."""

import os
import queue
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from accelerate_nb.events.event_types import StateChange
from accelerate_nb.events.run_state import RunState
from accelerate_nb.launching.end_signals import end_on_signals

HANDLES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("ranks_here", "printed"), [(range(1), "told\n"), (range(0), "")])
def test_a_process_receives_a_signal_where_the_rank_of_its_number_is_on_this_machine(
    ranks_here: range, printed: str
) -> None:
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    process = subprocess.Popen(
        [sys.executable, "-c", HANDLES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    view = RunState(1)
    view.apply(StateChange(0, "running", 0.0, str(process.pid)))
    # a run that is over need not be waited for
    over = SimpleNamespace(is_set=lambda: True)
    run = SimpleNamespace(view=view, over=over, ranks_here=ranks_here, request_stop=requests.put)
    with end_on_signals(run) as signals:  # type: ignore[arg-type] # no more of a run is needed
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.get(timeout=20) == "finish"
    assert signals == [signal.SIGTERM]
    assert process.communicate(timeout=20)[0] == printed
