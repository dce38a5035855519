"""One notebook full of what is hard in a script: plain Python, `accelerate-nb launch` and `torchrun` do the same with it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.export.making import code, exported
from tests.processes import TORCHRUN, python

CELLS = [
    code("lr = 0.1  # how far a step goes\nepochs = 2\nfail = ''", "parameters"),
    """%load_ext accelerate_nb
!pip install nothing-of-that-name
import json, os, warnings
import torch
from torch.utils.data import DataLoader, Dataset
from accelerate_nb import notebook_launcher
found = {}""",
    """class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return epochs * index**2


def batches(how):
    loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=how)
    return [batch.tolist() for batch in loader]""",
    "# The comment stands before the magic.\n%time found['loaded'] = [batches(how) for how in ('fork', 'spawn')]",
    """def described(name):
    %env NB_EVERYWHERE={name}
    text = !echo "$NB_EVERYWHERE" and \\
        no more
    return f"{text[0]} 100 % !{name!r}"

found['described'] = described('a name')""",
    "%%bash --out written\nfor i in 1 2; do echo $i; done",
    "with open('more.py', 'w') as file:\n    file.write('import sys\\nsaid = sys.argv[1:]')\n%run more.py a 'b c'\nfound['said'] = said",
    "async def later(value):\n    return value\n\nfound['later'] = await later(lr)",
    "%%accelerate -n 2 --cpu\nprint('begun on', rank)",
    "values = torch.arange(3.0) * lr",
    "%accelerate push values",
    "%%accelerate\nmine = values * (rank + 1)\ntotal = accelerator.reduce(mine, 'sum')",
    "%accelerate pull total",
    "%accelerate pull mine --rank 1",
    "found['total'], found['mine'], found['written'] = total.tolist(), mine.tolist(), written",
    """def trained(rate):
    from accelerate_nb import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = DataLoader(torch.rand(16, 3), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), 'mean').item())
    return losses""",
    "found['first'] = notebook_launcher(trained, args=(lr,), num_processes=2)",
    "found['second'] = notebook_launcher(trained, args=(2 * lr,), num_processes=2)",
    "if int(os.environ['RANK']) == 0:\n    with open('found.json', 'w') as file:\n        json.dump(found, file)",
    "warnings.warn('it is nearly over')\n1",
    "if fail == 'here':\n\n    raise ValueError('it was to fail here')",
]
# Plain Python becomes a launch of the script, since its cells ask for two processes.
WAYS = {
    "python": ["train.py"],
    "torchrun": [*TORCHRUN, "train.py"],
    "launch": ["-m", "accelerate_nb", "launch", "train.ipynb", "--num-processes", "2", "--cpu", "--"],
}
WORDS = ["--lr", "0.5", "--epochs", "3", "--fail", "here"]


class Ended(NamedTuple):
    """What a run left: its exit code, what it wrote, and what it found."""

    code: int
    output: str
    found: Mapping[str, Any]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Each way to run it, once; all of them fail in the last cell."""
    results = {}
    for way, words in WAYS.items():
        folder = tmp_path_factory.mktemp(way)
        exported(folder, *CELLS)
        environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = python(*words, *WORDS, folder=folder, limit=100, **environment)
        file = folder / "found.json"
        found = json.loads(file.read_text()) if file.is_file() else {}
        results[way] = Ended(done.returncode, done.stdout + done.stderr, found)
    return results


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_way_finds_the_same(ended: dict[str, Ended]) -> None:
    found = ended["python"].found
    assert found["loaded"] == [[[0, 3], [12, 27]]] * 2
    assert found["described"] == "a name and no more 100 % !'a name'"
    assert (found["said"], found["later"], found["written"]) == (["a", "b c"], 0.5, "1\n2\n")
    assert (found["total"], found["mine"]) == ([0.0, 1.5, 3.0], [0.0, 1.0, 2.0])
    assert len(found["first"]) == len(found["second"]) == 3 * 4
    assert found["first"][0] == found["second"][0]
    assert found["first"][-1] != found["second"][-1]
    for way, result in ended.items():
        assert result.found == found, f"{way}: {result.output}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
def test_an_error_and_a_warning_name_notebook_cell_and_line(way: str, ended: dict[str, Ended]) -> None:
    output = ended[way].output
    assert ended[way].code == 1
    assert "  train.ipynb, cell 21, line 3, in <module>" in output
    assert "ValueError: it was to fail here" in output
    assert not re.search(r'train\.py", line', output)
    # torch writes the rank before each line, and anew with every process group that is made
    assert "[rank1]: [rank1]" not in output
    assert output.count("train.ipynb, cell 20, line 1: UserWarning: it is nearly over") == 1


@pytest.mark.slow
def test_a_function_on_processes_that_the_script_starts_names_notebook_cell_and_line(tmp_path: Path) -> None:
    imports = "import warnings\nfrom accelerate_nb import notebook_launcher"
    function = "def train():\n    warnings.warn('take care')\n    raise ValueError('it was to fail')"
    call = "notebook_launcher(train, num_processes=2, cpu=True)"
    done = python(exported(tmp_path, f"{imports}\n{function}", call))
    assert done.returncode == 1
    assert "  train.ipynb, cell 1, line 5, in train" in done.stderr
    assert "  train.ipynb, cell 2, line 1, in <module>" in done.stderr
    assert "ValueError: it was to fail" in done.stderr
    assert "train.ipynb, cell 1, line 4: UserWarning: take care" in done.stdout + done.stderr
