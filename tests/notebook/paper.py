"""A sink on paper: it keeps what is put on it, in its order; and a terminal's screen, from what was sent to it."""

import re

from accelerate_nb.events.event_types import LogLine
from accelerate_nb.notebook.display.text_output import CellSink, LabelledLine, OutputLimits


def line(text, rank=0, stream="stdout", open=False, **more):
    return LogLine(rank, stream, text, 0.0, open, **more)


class Paper(CellSink):
    """A cell whose `lines`, with their labels, also say where something was shown."""

    def __init__(self, bound=OutputLimits(), *, redraws=True):  # noqa: B008
        self.bound, self.redraws = bound, redraws
        self.lines: list[LabelledLine] = []
        self.writes = 0
        self.open: list[str] = []
        self.opened: list[list[str]] = []
        self.shown: list[dict] = []
        self.names: list[tuple[str, bool]] = []

    def write(self, lines):
        self.lines.extend(line._replace(text=line.label + line.text) for line in lines)
        self.writes += bool(lines)

    def show_open(self, texts):
        self.open = list(texts)
        self.opened.append(self.open)

    def show(self, data, metadata, name="", *, update=False):
        self.shown.append(data)
        self.names.append((name, update))
        self.lines.append(LabelledLine("stdout", "<shown>"))

    @property
    def texts(self):
        return [line.text for line in self.lines]


class Desk:
    """A front end on paper, with a state of a run, and with a clock that is moved by hand."""

    def __init__(self, paper, view):
        self.paper, self.view, self.now = paper, view, 100.0

    def feed(self, *events):
        for event in events:
            self.view.apply(event)
        return self

    def refresh(self):
        self.now += 1.0
        self.front_end.refresh()
        return self


def on_screen(received):
    """The lines of a terminal that received this, with what has left it at its top, without colours."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", received.replace("\r\n", "\n")):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b["):
            row -= int(part[2:-1]) if part.endswith("A") else 0
            assert row >= 0
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines
