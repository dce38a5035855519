"""The reports that stay in a notebook's file: small ones on request, and those of notebooks that nobody watches."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.kernel.kernels import Kernel

TRAIN = """
from accelerate_nb import notebook_launcher
def train():
    from accelerate_nb import Accelerator
    accelerator = Accelerator(cpu=True)
    for step in range(5):
        accelerator.log({"loss": 1 / (step + 1)}, step=step)
    print("trained")
"""


def test_a_report_without_scripts_is_kept_where_it_is_requested_under_one_id_whenever_its_cell_runs(
    panel_kernel: Kernel,
) -> None:
    panel_kernel.ok(TRAIN)
    launch = "notebook_launcher(train, num_processes=1, cpu=True, report='static')"

    def reports(cell_id: str, code: str = launch) -> list[str]:
        shown = panel_kernel.start(code, cell_id).wait().result().displays
        return [item["text/html"] for item in shown if "text/html" in item]

    (html,) = reports("a")
    assert "<script" not in html
    assert "chart of loss" in html
    assert len(html) < 10_000
    ids = [
        re.match(r'<div id="([^"]+)">', html)[1] for html in [html, *reports("a"), *reports("b", f"{launch}; {launch}")]
    ]
    assert ids[0] == ids[1]
    assert len({*ids}) == 3


@pytest.mark.parametrize("report", ["interactive", pytest.param("static", marks=pytest.mark.slow)])
def test_a_notebook_that_nbconvert_executes_keeps_its_lines_and_then_the_report(tmp_path: Path, report: str) -> None:
    cells = [TRAIN, f"notebook_launcher(train, num_processes=1, cpu=True, report={report!r})"]
    nbformat.write(new_notebook(cells=[new_code_cell(text) for text in cells]), tmp_path / "nightly.ipynb")
    words = ["jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace", "nightly.ipynb"]
    done = subprocess.run(
        [str(Path(sys.executable).with_name(words[0])), *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = nbformat.read(tmp_path / "nightly.ipynb", as_version=4).cells[1].outputs
    assert [output.output_type for output in outputs][-1] == "display_data"
    assert "[0] trained" in "".join(output.text for output in outputs if output.output_type == "stream")
    (html,) = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert "chart of loss" in html
    assert "<script" not in html
