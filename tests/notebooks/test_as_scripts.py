"""Each notebook gives as a script the very numbers that it gives as a notebook, whoever starts the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from accelerate_nb.export.reading import read
from accelerate_nb.export.script import as_script
from tests.notebooks.executing import ALIKE, NOTEBOOKS, SECONDS, Executing, answer, asked

LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate-nb": ["accelerate_nb", "launch", "-n", "2", "--cpu"],
}


def came_to(name: str, folder: Path, launcher: str | None = None) -> Any:
    """What a notebook comes to as a script, run by plain Python or by a launcher; `accelerate-nb` takes the notebook itself."""
    notebook = folder / name
    nbformat.write(asked(name), notebook)
    script = notebook.with_suffix(".py")
    script.write_text(as_script(read(notebook)).text, encoding="utf-8")
    words = [sys.executable, script.name]
    if launcher is not None:
        what = notebook if launcher == "accelerate-nb" else script
        words = [sys.executable, "-m", *LAUNCHERS[launcher], what.name]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **ALIKE, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return answer(folder)


@pytest.mark.slow
@pytest.mark.timeout(8 * SECONDS)
@pytest.mark.parametrize("name", [path.name for path in NOTEBOOKS])
def test_plain_python_gives_the_notebook_s_numbers(name: str, run_of: Executing, tmp_path: Path) -> None:
    assert came_to(name, tmp_path) == run_of(name).answer


@pytest.mark.slow
@pytest.mark.timeout(8 * SECONDS)
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("01_first_run.ipynb", "torchrun"),
        ("04_panel.ipynb", "accelerate-nb"),
        ("05_cells_on_every_rank.ipynb", "torchrun"),
    ],
)
def test_a_launched_script_gives_the_notebook_s_numbers(
    name: str, launcher: str, run_of: Executing, tmp_path: Path
) -> None:
    assert came_to(name, tmp_path, launcher) == run_of(name).answer
