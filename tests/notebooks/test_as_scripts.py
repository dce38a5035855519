"""Each notebook gives as a script the very numbers that it gives as a notebook, whoever starts the script."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from accelerate_nb.export.notebook import read
from accelerate_nb.export.script import as_script
from tests.notebooks.executing import ALIKE, LIMIT, NOTEBOOKS, Executing, answer, notebook_with_answer
from tests.processes import python

LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate-nb": ["accelerate_nb", "launch", "-n", "2", "--cpu"],
}


def came_to(name: str, folder: Path, launcher: str | None = None) -> Any:
    """What a notebook comes to as a script, run by plain Python or by a launcher; `accelerate-nb` takes the notebook itself."""
    notebook = folder / name
    nbformat.write(notebook_with_answer(name), notebook)
    script = notebook.with_suffix(".py")
    script.write_text(as_script(read(notebook)).text, encoding="utf-8")
    words = [script.name]
    if launcher is not None:
        what = notebook if launcher == "accelerate-nb" else script
        words = ["-m", *LAUNCHERS[launcher], what.name]
    done = python(*words, folder=folder, limit=LIMIT, **ALIKE, MPLBACKEND="agg")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return answer(folder)


# Each notebook once, by one of those who may start it: plain Python, where no other is named.
STARTED_BY = {"04_panel.ipynb": "accelerate-nb", "05_cells_on_every_rank.ipynb": "torchrun"}


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.parametrize("name", sorted({path.name for path in NOTEBOOKS} | STARTED_BY.keys()))
def test_a_script_gives_the_notebook_s_numbers(name: str, run_of: Executing, tmp_path: Path) -> None:
    assert came_to(name, tmp_path, STARTED_BY.get(name)) == run_of(name).answer
