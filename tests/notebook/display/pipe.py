"""Each line of the standard input is a line of a rank that the front end shows."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from accelerate_nb.events.event_types import LogLine
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.text import TextFrontEnd

view = RunState(2)
ticks = iter(range(1000))
front_end = TextFrontEnd(quiet=True)
front_end.opened(SimpleNamespace(view=view, folder=Path("/runs/1"), name="f", why="", started=time.time()))
front_end._clock = lambda: 1e9 + next(ticks)
for text in sys.stdin:
    view.apply(LogLine(0, "stdout", text.rstrip("\n"), 0.0))
    front_end.refresh()
