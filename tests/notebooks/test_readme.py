"""The README's first cell shows what the README says it shows."""

import os
import re
from pathlib import Path

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.notebooks.executing import INTO_A_FILE

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def block(language: str, start: str) -> str:
    """The first code block of the README in a language, among those that begin so."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return next(found for found in blocks if found.startswith(start))


def lines(text: str) -> list[str]:
    """The lines of an output in the order of the alphabet, since ranks finish in any order, without their decimals."""
    return sorted(re.sub(r"\.\d+", ".#", line) for line in text.splitlines() if line.strip())


def test_the_smallest_complete_cell_prints_what_the_readme_shows(tmp_path: Path) -> None:
    notebook = new_notebook(cells=[new_code_cell(block("python", "%load_ext"))])
    client = NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute(env={**os.environ, **INTO_A_FILE})
    outputs = notebook.cells[0].outputs
    shown = [output.text if output.output_type == "stream" else output.data["text/plain"] for output in outputs]
    assert lines("\n".join(shown)) == lines(block("text", "[0]"))
