"""The notebooks of this repository, executed: what each of them came to, and what it showed."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What is known of nbconvert and the like; pytest may well show a page.
INTO_A_FILE = {"ACCELERATE_NB_PANEL": "text"}
# With as many threads in every process, whoever starts it, sums are rounded alike.
ALIKE = {"OMP_NUM_THREADS": "1"}
# A notebook takes under a minute on a laptop: one that takes as many seconds hangs, also on a machine that is slow or busy.
LIMIT = 400

# What is asked of a notebook when it has come to its end.
_WEIGHTS = "sha256(b''.join(value.numpy().tobytes() for value in result['weights'].values())).hexdigest()"
ANSWER_EXPRESSIONS = {
    "01_first_run.ipynb": "[{key: result[key] for key in ('losses', 'accuracies', 'processes', 'precision')}, "
    f"len(test_images), {_WEIGHTS}]",
    "02_same_numbers.ipynb": "runs",
    "03_language_model.ipynb": "{key: result[key] for key in ('losses', 'tests', 'processes')}",
    "04_panel.ipynb": "[result, later]",
    "05_cells_on_every_rank.ipynb": "[accuracy, losses]",
    "06_pick_a_configuration.ipynb": "[result, from_file, [check.state for check in checks]]",
    "07_tpu.ipynb": "{key: result[key] for key in ('losses', 'correct', 'total', 'ranks')}",
    "08_larger_models.ipynb": "{name: [result['losses'], result['megabytes']] for name, result in results.items()}",
    "09_deepspeed_and_megatron.ipynb": "results",
    "10_many_machines.ipynb": "[places, float((alone - together).abs().max())]",
}
_ANSWER = "answer.json"


@dataclass(frozen=True, slots=True)
class Executed:
    """A notebook after its run, and what it came to."""

    notebook: NotebookNode
    answer: Any

    @property
    def cells(self) -> dict[str, NotebookNode]:
        """Its cells by their names."""
        return {cell.id: cell for cell in self.notebook.cells}


Executing = Callable[[str], Executed]


def notebook_with_answer(name: str) -> NotebookNode:
    """A notebook with a last cell that writes down what it came to; in a script, the first of its processes does."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    source = "import json, os\nfrom hashlib import sha256\nif os.environ.get('RANK', '0') == '0':\n"
    source += f"    with open({_ANSWER!r}, 'w') as _file:\n        json.dump({ANSWER_EXPRESSIONS[name]}, _file)"
    notebook.cells.append(new_code_cell(source))
    return notebook


def answer(folder: Path) -> Any:
    """What the last cell has written where the notebook, or its script, ran."""
    return json.loads((folder / _ANSWER).read_text(encoding="utf-8"))


def executed(name: str, folder: Path) -> Executed:
    """A notebook after a run in a kernel, in this folder."""
    notebook = notebook_with_answer(name)
    client = NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute(env={**os.environ, **INTO_A_FILE, **ALIKE})
    return Executed(notebook, answer(folder))


def printed(cell: NotebookNode) -> str:
    """What a cell wrote."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures(notebook: NotebookNode) -> int:
    """How many plots a notebook shows."""
    return sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
