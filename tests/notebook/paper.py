"""A screen on paper: it keeps what is put on it, in its order."""

from __future__ import annotations

from accelerate_nb.notebook.screens import Bound, Line


class Paper:
    """A screen whose `lines` also say where something was shown."""

    def __init__(self, bound=Bound(), *, redraws=True):  # noqa: B008
        self.bound, self.redraws = bound, redraws
        self.lines: list[Line] = []
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
        self.lines.append(Line("stdout", "<shown>"))
