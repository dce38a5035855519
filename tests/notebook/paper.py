"""A screen on paper: it keeps what is put on it, in its order."""

from __future__ import annotations

from accelerate_nb.notebook.display.text_sinks import OutputLimits
from accelerate_nb.reports.standard_streams import LabelledLine


class Paper:
    """A screen whose `lines` also say where something was shown."""

    def __init__(self, bound=OutputLimits(), *, redraws=True):  # noqa: B008
        self.bound, self.redraws = bound, redraws
        self.lines: list[LabelledLine] = []
        self.open: list[str] = []
        self.shown: list[dict] = []
        self.names: list[tuple[str, bool]] = []

    def write(self, lines):
        self.lines.extend(lines)

    def show_open(self, texts):
        self.open = list(texts)

    def show(self, data, metadata, name="", *, update=False):
        self.shown.append(data)
        self.names.append((name, update))
        self.lines.append(LabelledLine("stdout", "<shown>"))
