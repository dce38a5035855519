"""Cells on every rank are ordinary code of a script, and what can't be is told with its cell and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_nb.config.magic_args import line_commands
from accelerate_nb.export.notebook import NotebookCell
from accelerate_nb.export.rank_cells.find import parse_commands
from accelerate_nb.export.rank_cells.translate import ranked
from accelerate_nb.export.translated_cell import RankCells
from tests.export.rank_cells.test_name_conflicts import cells_of, notes_of, problems_of

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "05_cells_on_every_rank.ipynb"


def of(*sources: str) -> RankCells:
    """What becomes of cells; all of them keep their number of lines."""
    found = ranked(cells_of(*sources))
    for number, cell in found.cells.items():
        assert cell.source.count("\n") == sources[number - 1].count("\n")
    return found


def text(found: RankCells, number: int) -> str:
    """A cell's code."""
    return found.cells[number].source


def test_a_notebook_without_such_cells_stays_as_it_is():
    assert of("%time x = 1", "print('accelerate')") == RankCells()


def test_a_cell_of_ranks_is_its_own_body():
    found = of("import torch", "\n%%accelerate -n 2 --mixed-precision bf16\nx = rank\nx")
    assert text(found, 2) == "\n# %%accelerate -n 2 --mixed-precision bf16\nx = rank\nx"
    assert (found.needed, found.first) == ('num_processes=2, mixed_precision="bf16"', 2)
    assert problems_of(found) == notes_of(found) == []


def test_a_session_of_which_nothing_is_set_leaves_the_number_to_the_launcher():
    assert of("%%accelerate\nx = 1").needed == ""


def test_some_ranks_are_behind_a_guard_that_keeps_texts_as_they_are():
    found = of('%%accelerate --ranks 0,2-3\nx = """a\nb"""\nif x:\n    y = f"""{x}\n  c"""\n\nx')
    assert text(found, 1) == (
        'if rank in (0, 2, 3):  # %%accelerate --ranks 0,2-3\n    x = """a\nb"""\n    if x:\n        y = f"""{x}\n  c"""\n\n'
        "    shown(x)"
    )
    assert found.cells[1].imports == ("from accelerate_nb.script.display import shown",)
    compile(text(of("%%accelerate --ranks 0"), 1), "", "exec")


def test_what_some_ranks_have_is_pulled_from_one_that_has_it():
    found = of("%%accelerate --ranks 1\nscore = 1", "%accelerate pull score --rank 1", "print(score)")
    assert text(found, 2) == "score = pull_from(1, lambda: score)"
    assert found.cells[2].imports == ("from accelerate_nb.script.exchange import pull_from",)


def test_a_cell_magic_below_stays_the_first_line_that_is_not_empty():
    assert text(of("%%accelerate\n%%time\nx = 1"), 1) == "\n%%time\nx = 1"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("%accelerate push x y", "x, y = push(x, y)"),
        ("%accelerate push x, y", "x, y = push(x, y)"),
        ("%accelerate pull x", "x = pull(x)"),
        ("%accelerate pull x y --rank 1", "x, y = pull(x, y, rank=1)"),
        ("%accelerate pull x --all", "x = pull(x, every=True)"),
        ("%accelerate run f(1, *x, a=2, **y)", "run(f, 1, *x, a=2, **y)"),
        ("z = %accelerate run f(x)", "z = run(f, x)"),
        ("%accelerate status", "# %accelerate status"),
        ("%accelerate", "# %accelerate"),
        ("%accelerate logs --rank 1", "# %accelerate logs --rank 1"),
        ("%accelerate stop", "# %accelerate stop"),
        ("%accelerate push \\\n  x y", "x, y = push(x, y)\n#"),
        ("if x:\n    %accelerate push x", "if x:\n    x = push(x)"),
        ("for _ in x:\n    %accelerate stacks", "for _ in x:\n    pass  # %accelerate stacks"),
        ("%time f()\n%accelerate push x\n!ls", "%time f()\nx = push(x)\n!ls"),
    ],
)
def test_a_command_is_translated_where_it_stands(line, code):
    found = of("%%accelerate --local\nx = y = [1]\ndef f(*args, **more): ...", line)
    assert text(found, 2) == code
    assert problems_of(found) == []


def test_every_command_is_known_here():
    for command in line_commands():
        rest = {"push": "x", "pull": "x", "run": "f()"}.get(command.word, "")
        found = of(f"x = 1\ndef f(): ...\n%accelerate {command.word} {rest}".rstrip())
        assert problems_of(found) == []
        assert "\n%accelerate" not in text(found, 1)


def test_functions_of_the_notebook_keep_their_names():
    found = of("def push(x): ...", "pull = 3", "x = 1\n%accelerate push x\n%accelerate pull x")
    assert text(found, 3) == "x = 1\nx = _push(x)\nx = _pull(x)"
    assert "from accelerate_nb.script.exchange import push as _push" in found.cells[3].imports


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["x = 1\n%%accelerate -n 2"], "1:2 %%accelerate is below other lines"),
        (["# two\n%%accelerate -n 2\nx = 1"], "1:2 %%accelerate is below other lines"),
        (["%%accelerate --rangs 0\nx = 1"], "1:1 %%accelerate was given --rangs"),
        (["%%accelerate -n 2 --ranks 2\nx = 1"], "1:1 --ranks was given '2', and the session has the ranks 0-1"),
        (["%%accelerate --ranks 0 --local\nx = 1"], "Leave one of them out."),
        (["%%accelerate\nx = 1", "%%accelerate --restart\nx = 1"], "2:1 the session would restart"),
        (["%%accelerate -n 2\nx = 1", "%%accelerate -n 4\nx = 1"], "num_processes was 2 and is 4 now"),
        (["%%accelerate\nx = 1", "%%accelerate --cpu\nx = 1"], "2:1 the session would restart here (cpu was False"),
        (["%%accelerate\nx = 1", "y = 1\n%accelerate restart"], "2:2 the session would restart"),
        (
            ["%%accelerate\nx = 1", "%accelerate stop", "%%accelerate\nx = 1"],
            "2:1 the session is stopped here, and cell 3",
        ),
        (["%%accelerate\n%accelerate push x"], "1:2 %accelerate is in a %%accelerate cell"),
        (["x = 1\ndef f():\n    %accelerate push x"], "1:3 %accelerate push is in a function"),
        (["%accelerate pusch x"], "1:1 %accelerate was given 'pusch'. Did you mean push?"),
        (["%accelerate push"], "1:1 %accelerate push was given no name"),
        (["%accelerate run f"], "1:1 %accelerate run was given 'f', which is no call"),
        (["x = %accelerate status"], "1:1 x = %accelerate status keeps what a script does not have"),
    ],
)
def test_what_a_script_can_t_do_is_reported_with_its_cell_and_line(sources, message):
    assert message in "\n".join(problems_of(of(*sources)))


@pytest.mark.parametrize(
    "sources",
    [
        [
            "%%accelerate -n 2 --restart\nx = 1",
            "%%accelerate -n 2\nx",
            "%%accelerate --no-cpu --hang-warning-after 5\nx",
        ],
        ["%accelerate stop", "%%accelerate\nx = 1"],
        ["%%accelerate\nx = 1", "%accelerate stop", "y = 1", "%accelerate stop"],
        ["%accelerate restart -n 2", "%%accelerate\nx = 1"],
    ],
)
def test_what_keeps_the_session_as_it_is_can_be_set_again(sources):
    assert problems_of(of(*sources)) == []


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["%%accelerate --background --timeout 3\nx = 1"], "1:1 --background was left out"),
        (["%%accelerate --background --timeout 3\nx = 1"], "1:1 --timeout was left out"),
        (["%accelerate config"], "1:1 %accelerate config was left out: pass the settings"),
        (
            ["x = 1", "%%accelerate\nprint(x)"],
            "2:2 x is read here, and the ranks did not have it: it was bound in cell 1",
        ),
    ],
)
def test_what_a_person_should_know_is_noted(sources, message):
    assert message in "\n".join(notes_of(of(*sources)))


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            ["x = 1", "%%accelerate\nx = 2", "print(x)"],
            "3:1 x is read here by the notebook, where it was bound in cell 1",
        ),
        (["%%accelerate\nx = 1", "x = 2", "%%accelerate\n\nx"], "3:3 x is read here by the ranks"),
        (["x = 1\ndef f():\n    return x", "%%accelerate\nx = 2", "f()"], "3:1 x is read here by the notebook (in f)"),
        (["device = 1", "%%accelerate\nrank", "print(device)"], "the session defines it on the ranks"),
        (["%%accelerate\nrank", "rank = 3", "%%accelerate\nrank"], "the session defines it. A script has one rank"),
        (
            ["x = []\n%accelerate push x", "%%accelerate\nx.append(1)", "len(x)"],
            "it was changed in cell 2 by the ranks",
        ),
        (["x = []\n%accelerate push x", "%%accelerate\nx[0] = 1", "len(x)"], "it was changed in cell 2"),
        (["%%accelerate\nx = 1", "%accelerate pull x", "%%accelerate\nx = 2", "x"], "Pull it again, or rename"),
        (["%%accelerate\ninput = 1", "input()"], "which have Python's own"),
        (
            ["%%accelerate\nrank = 1", "%%accelerate\nx = 1", "x = 2", "y = 1\nif y:\n    x = 3", "%%accelerate\nx"],
            "5:2 x",
        ),
        (["from os import path", "%%accelerate\nfrom sys import path", "path"], "3:1 path is read here"),
    ],
)
def test_a_name_that_would_mean_another_value_is_refused(sources, message):
    assert message in "\n".join(problems_of(of(*sources)))


@pytest.mark.parametrize(
    "sources",
    [
        ["import torch", "%%accelerate\nimport torch", "torch.ones(1)", "%%accelerate\ntorch.ones(1)"],
        ["def f(x):\n    return x", "%%accelerate\ndef f(x):\n    return x", "f(1)"],
        ["%%accelerate --local\nx = 1", "x", "%%accelerate\nx"],
        ["x = 1\n%accelerate push x", "%%accelerate\ny = x + 1", "print(x)", "%accelerate pull y", "y"],
        [
            "for i in range(3):\n    print(i)",
            "%%accelerate\nfor i in range(2):\n    print(i)",
            "for i in 'a':\n    print(i)",
        ],
        ["x = [i for i in range(3)]", "%%accelerate\ni = 1", "y = [i for i in range(2)]", "%%accelerate\ni"],
        ["def f():\n    x = 1\n    return x", "%%accelerate\nx = 2", "f()", "%%accelerate\nx"],
        ["from torch import nn", "%%accelerate\nfrom torch import nn\nnn.init.zeros_(nn.Linear(1, 1).weight)", "nn"],
        ["class A:\n    x = 1\n    y = x", "%%accelerate\nx = 2", "A()", "%%accelerate\nx"],
    ],
)
def test_names_that_mean_the_same_are_no_conflict(sources):
    assert problems_of(of(*sources)) == []


def test_what_a_pull_covers_is_there_again_for_the_ranks():
    found = of(
        "%%accelerate\nlosses = []",
        "%accelerate pull losses",
        "%%accelerate\nlosses.append(1)",
        "%accelerate pull losses",
        "%accelerate pull losses --all",
        "print(losses)",
    )
    assert problems_of(found) == []
    assert text(found, 2) == "_own_losses = losses; losses = pull(losses)"
    assert text(found, 3) == "losses = _own_losses  # %%accelerate\nlosses.append(1)"
    assert text(found, 4) == "_own_losses = losses; losses = pull(losses)"
    assert text(found, 5) == "losses = pull(_own_losses, every=True)"


def test_the_class_of_the_session_s_accelerator_is_imported_where_a_cell_uses_it():
    found = of("%%accelerate\nx = Accelerator()", "%%accelerate\nx")
    assert found.cells[1].imports == ("from accelerate_nb import Accelerator",)
    assert found.cells[2].imports == ()


# -------------------------------------------------------------------------------------------------------------- hearing


def test_lines_keep_their_numbers_whatever_ipython_makes_of_them():
    source = "x = !ls \\\n  -l\n\n%time \\\n f()\n%accelerate push \\\n  x\ny = 1?\nz = 2"
    found = parse_commands(source)
    assert found.python.count("\n") == source.count("\n")
    assert [(command.first, command.last, command.text) for command in found.commands] == [(6, 7, "push    x")]
    assert found.python.split("\n")[-1] == "z = 2"


def test_what_only_looks_like_a_command_is_none():
    assert parse_commands("'''\n%accelerate push x\n'''").commands == ()
    assert parse_commands("%accelerate?").commands == ()
    assert parse_commands("%%bash\n%accelerate push x").commands == ()
    assert parse_commands("%%time\n%accelerate push x").commands[0].first == 2
    assert parse_commands("  %accelerate push x\n  y = 1").commands[0].text == "push x"


# ------------------------------------------------------------------------------------------------------- a whole script


def test_cells_that_are_no_code_are_none_of_ours():
    assert ranked([NotebookCell("markdown", "%%accelerate\nx", None)]) == RankCells()
