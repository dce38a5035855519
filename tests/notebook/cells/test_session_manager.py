"""The notebook's session, as it is started."""

import threading
from types import SimpleNamespace

from accelerate_nb.notebook.cells import session_manager
from accelerate_nb.notebook.cells.session_manager import NotebookSession


def test_a_start_that_takes_a_while_reports_it_meanwhile(monkeypatch):
    messages, has_message = [], threading.Event()

    def record(text):
        messages.append(text)
        has_message.set()

    def start(config):
        assert has_message.wait(30)
        return SimpleNamespace(size=2, why="2 on the CPU", alive=True)

    monkeypatch.setattr(session_manager, "print_message", record)
    monkeypatch.setattr(session_manager.Session, "start", start)
    NotebookSession().ready({"num_processes": 2, "cpu": True})
    assert messages[0] == "starting 2 processes…"
    assert messages[1].startswith("2 processes are ready after")
