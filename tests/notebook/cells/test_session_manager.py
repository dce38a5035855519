"""The notebook's session, as it is started."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from accelerate_nb.notebook.cells import session_manager
from accelerate_nb.notebook.cells.session_manager import NotebookSession


def test_a_start_that_takes_a_while_says_so_meanwhile(monkeypatch):
    said, was_said = [], threading.Event()

    def say(text):
        said.append(text)
        was_said.set()

    def start(config):
        assert was_said.wait(30)
        return SimpleNamespace(size=2, why="2 on the CPU", alive=True)

    monkeypatch.setattr(session_manager, "print_message", say)
    monkeypatch.setattr(session_manager.Session, "start", start)
    NotebookSession().ready({"num_processes": 2, "cpu": True})
    assert said[0] == "starting 2 processes…"
    assert said[1].startswith("2 processes are ready after")
