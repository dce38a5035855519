"""A script of `%%accelerate` cells finds the processes that it needs, however it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.config.formats import read_words
from accelerate_nb.config.run_config import all_settings, resolve
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.script import relaunch
from accelerate_nb.script.relaunch import launch_words, needed

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment as a launcher gives it to the first of two processes."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    # set and taken away, so that what the script adds goes away too
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def as_script(text: str, name: str = "__main__") -> None:
    """Run a line as a script would."""
    exec(text, {"__name__": name, "__file__": "train.py", "needed": needed})


def test_a_launched_process_receives_what_nobody_else_set(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    as_script("needed(__file__, cpu=True, mixed_precision='bf16', gradient_accumulation_steps=4)")
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
    assert os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "8"


def test_what_no_cell_set_is_left_to_the_launcher(launched: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    as_script("needed(__file__)")
    assert dict(os.environ) == before


def test_another_number_of_processes_is_reported_once(
    launched: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_script("needed(__file__, num_processes=2)")
    assert capsys.readouterr().err == ""
    as_script("needed(__file__, num_processes=4)")
    assert "train.py: its cells request 4 processes, but 2 processes were started." in capsys.readouterr().err
    launched.setenv("RANK", "1")
    as_script("needed(__file__, num_processes=4)")
    assert capsys.readouterr().err == ""


def test_a_setting_that_can_t_be_is_reported(launched: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="mixed_precision"):
        as_script("needed(__file__, mixed_precision='bf17')")


@pytest.mark.parametrize("name", ["__mp_main__", "train"])
def test_a_script_that_is_imported_launches_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    as_script("needed(__file__, num_processes=2)", name)


def test_the_words_of_the_launch_give_the_same_settings() -> None:
    settings: dict[str, Any] = {"num_processes": 2, "cpu": True, "mixed_precision": "bf16", "folder": "my runs"}
    words = launch_words("train.py", ["--num-processes", "9"], settings)
    assert words[:3] == ["-m", "accelerate_nb", "launch"]
    script = words.index(os.path.abspath("train.py"))
    values, others = read_words(words[3:script], all_settings(), "A command line")
    assert resolve(values, {}) == resolve(settings, {})
    assert others == []
    assert words[script + 1 :] == ["--num-processes", "9"]


SETTINGS = {"num_processes": 2, "mixed_precision": "bf16"}
SCRIPT = f"""
import sys
print("before")
sys.executable = "./telling"
from accelerate_nb.script.relaunch import needed
needed(__file__, **{SETTINGS})
raise SystemExit("not reached")
"""
# What stands in for Python: it tells how it was called, and ends with a code of its own.
TELLING = """#!/bin/sh
echo $$
for word; do echo "$word"; done
exit 7
"""


def test_plain_python_becomes_the_launch_with_its_flags_and_ends_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "telling").write_text(TELLING)
    (tmp_path / "telling").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in PLACE}
    with subprocess.Popen(
        [sys.executable, "-O", "-W", "ignore", "-X", "dev", "train.py", "--epochs", "3"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        out, _ = process.communicate(timeout=60)
    first, pid, *words = out.splitlines()
    assert process.returncode == 7
    assert first == "before"
    assert pid == str(process.pid)
    launch = launch_words(str(tmp_path / "train.py"), ["--epochs", "3"], SETTINGS)
    assert words[-len(launch) :] == launch
    # the environment may say more of this kind
    assert {"-O", "-Wignore", "-X", "dev"} <= set(words[: -len(launch)])


def test_a_notebook_that_runs_the_script_keeps_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(relaunch, "_become", lambda words: pytest.fail(f"it became {words}"))
    InteractiveShell.instance()
    try:
        with pytest.raises(LaunchError, match=r"accelerate-nb launch train\.py"):
            as_script("needed(__file__, num_processes=2)")
    finally:
        InteractiveShell.clear_instance()
