"""Commands work in a folder of their own, and read no configuration file of the person who runs the tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which one works; what is launched leaves its runs there."""
    monkeypatch.setenv("ACCELERATE_NB_FOLDER", str(tmp_path / "runs"))
    monkeypatch.setenv("ACCELERATE_NB_TIMEOUT", "90")
    return tmp_path
