"""A launched script draws the numbers of its notebook: those of the kernel, of launched functions and of the ranks."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.export.making import exported
from tests.processes import TORCHRUN, python

SAMPLER = """class Drawn(torch.utils.data.Sampler):
    def __len__(self):
        return 8

    def __iter__(self):
        return iter(random.sample(range(8), 8))

def orders():
    from accelerate_nb import Accelerator
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, sampler=Drawn())
    return [batch.tolist() for loader in [Accelerator(cpu=True).prepare(loader)] for _ in range(2) for batch in loader]"""
DRAW = "json.dumps([random.random(), np.random.rand(), torch.rand(1).item()])"
CELLS = [
    "%load_ext accelerate_nb\nimport json, random\nfrom accelerate_nb import notebook_launcher\nimport numpy as np\nimport torch",
    "labels = [f'label {i}' for i in range(99)]\nrandom.shuffle(labels)\nkinds = list(set(labels))",
    f"print('own =', labels, kinds, {DRAW})",
    f"def draw():\n    import json, random\n    import numpy as np, torch\n    return {DRAW}",
    "print('own =', notebook_launcher(draw, num_processes=2, cpu=True, results='all'))",
    "random.seed(3)\nnp.random.seed(4)\ntorch.manual_seed(5);",
    f"{SAMPLER}\nprint('=', notebook_launcher(orders, num_processes=2, cpu=True, results='all'))",
    "print('=', draw())",
    "print('=', notebook_launcher(draw, num_processes=2, cpu=True, results='all'))",
    "print('=', draw())\n%accelerate restart -n 2 --cpu\n%accelerate push labels\nprint('=', draw())",
    f"%%accelerate\nimport json, random\nimport numpy as np, torch\nprint('=', {DRAW})",
    "print('=', draw())",
    "print('=', draw())",
    "result = %accelerate run draw()\nprint('=', result, draw())",
    f"%%accelerate\nprint('=', {DRAW})",
    "%%accelerate --local\ntorch.manual_seed(6);",
    f"%%accelerate\nprint('=', {DRAW}, torch.rand(3).tolist())",
    "print('=', draw())",
]


def drawn_in_a_kernel(path: Path) -> list[str]:
    """What the notebook prints of its numbers."""
    content = nbformat.read(path, as_version=4)
    environment = {**os.environ, "ACCELERATE_NB_PANEL": "text"}
    NotebookClient(content, timeout=60, kernel_name="python3").execute(env=environment)
    outputs = [output for cell in content.cells for output in cell.get("outputs", ())]
    return number_lines("".join(output.text for output in outputs if output.get("name") == "stdout"))


def number_lines(text: str) -> list[str]:
    """The lines that tell numbers, without who wrote them."""
    return [line.removeprefix("[0-1] ") for line in text.splitlines() if "= " in line]


def logs(folder: Path, name: str) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob(f"logs/*/*/*/{name}.log"))]


@pytest.mark.slow
def test_under_torchrun_every_process_draws_what_the_notebook_draws(tmp_path: Path) -> None:
    script = exported(tmp_path, *CELLS)
    words = [*TORCHRUN, "--redirects", "3", "--log-dir", tmp_path / "logs", script]
    done = python(*words, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    assert done.returncode == 0, (done.stderr, logs(tmp_path, "stderr"))
    first, second = map(number_lines, logs(tmp_path, "stdout"))
    # what cells of ranks print
    assert set(second) < set(first)
    kernel = drawn_in_a_kernel(tmp_path / "train.ipynb")
    assert len(kernel) == 14
    assert first[2:] == kernel[2:]
