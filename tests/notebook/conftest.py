"""Folders of a test's own, the configuration file that a launch finds there, and a shell as notebooks have it."""

import atexit
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def default_file(tmp_path):
    path = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture(scope="module")
def one_shell(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a shell puts its own there
        folder = str(tmp_path_factory.mktemp("ipython"))
        made = InteractiveShell(ipython_dir=folder, config=Config({"HistoryManager": {"enabled": False}}))
        made.colors = "nocolor"
        yield made
        made.atexit_operations()
        atexit.unregister(made.atexit_operations)
