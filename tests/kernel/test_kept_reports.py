"""The reports that stay in a notebook's file: small ones on request, and those of notebooks that nobody watches."""

import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from tests.kernel.pages import VIEW
from tests.processes import python

TRAIN = """
from accelerate_nb import notebook_launcher
def train():
    from accelerate_nb import Accelerator
    accelerator = Accelerator(cpu=True)
    for step in range(5):
        accelerator.log({"loss": 1 / (step + 1)}, step=step)
    print("trained")
"""


def test_a_notebook_that_nbconvert_executes_keeps_its_lines_and_then_the_report(tmp_path: Path) -> None:
    cells = [TRAIN, "notebook_launcher(train, num_processes=1, cpu=True)"]
    nbformat.write(new_notebook(cells=[new_code_cell(text) for text in cells]), tmp_path / "nightly.ipynb")
    words = ["--to", "notebook", "--execute", "--inplace", "nightly.ipynb"]
    done = python(Path(sys.executable).with_name("jupyter"), "nbconvert", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    executed = nbformat.read(tmp_path / "nightly.ipynb", as_version=4)
    assert "widgets" not in executed.metadata
    outputs = executed.cells[1].outputs
    assert not any(VIEW in output.get("data", {}) for output in outputs)
    assert [output.output_type for output in outputs][-1] == "display_data"
    assert "[0] trained" in "".join(output.text for output in outputs if output.output_type == "stream")
    (html,) = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert "chart of loss" in html
    assert "<script" not in html
