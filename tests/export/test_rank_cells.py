"""Cells on every rank in a script: what its session is, and what can't be in one is told with its cell and line."""

from pathlib import Path

import pytest

from accelerate_nb.config.magic_args import line_commands
from accelerate_nb.errors import ExportError
from tests.export.making import cell_lines, script

BEGIN = "%%accelerate\nx = 1"


def problems_of(folder: Path, *sources: str) -> str:
    """What keeps a notebook from being exported; nothing, where nothing does."""
    try:
        script(folder, *sources)
    except ExportError as error:
        return str(error)
    return ""


def begins(folder: Path, *sources: str) -> list[str]:
    """The lines of a script that begin its session."""
    return [line.strip() for line in script(folder, *sources).text.split("\n") if "begin(__file__" in line]


def test_a_cell_of_ranks_is_text_on_its_own_lines_and_its_session_begins_above(tmp_path):
    found = script(tmp_path, "import torch", '\n%%accelerate -n 2 --mixed-precision bf16\nx = """a\nb"""\n!ls\nx')
    assert cell_lines(found.text)[2:] == [
        "# %% [2] train.ipynb",
        '    nb_shell.cell("accelerate", "-n 2 --mixed-precision bf16", \'\'\'\\',
        'x = """a',
        'b"""',
        'nb_shell.run("ls")',
        "x''')",
    ]
    assert '    nb_shell.begin(__file__, num_processes=2, mixed_precision="bf16")  # +' in found.text.split("\n")
    assert found.notes == ()


def test_a_notebook_without_such_cells_has_no_session(tmp_path):
    cells = ["x = 1", "%time x = 1", "print('%%accelerate')", "%accelerate status", "%accelerate pull x"]
    assert begins(tmp_path, *cells) == []


def test_a_session_of_which_nothing_is_set_leaves_the_number_to_the_launcher(tmp_path):
    assert begins(tmp_path, "%%accelerate\nx = 1") == ["nb_shell.begin(__file__)  # +"]
    assert begins(tmp_path, "x = 1\n%accelerate push x") == ["nb_shell.begin(__file__)  # +"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("%accelerate push x y", 'nb_shell.line("accelerate", "push x y")'),
        ("%accelerate pull x --all", 'nb_shell.line("accelerate", "pull x --all")'),
        ("z = %accelerate run f(1, *x, a=2)", 'z = nb_shell.line("accelerate", "run f(1, *x, a=2)")'),
        ("%accelerate", "# %accelerate"),
        ("%accelerate logs --rank 1", "# %accelerate logs --rank 1"),
        ("%accelerate stop", "# %accelerate stop"),
        ("for _ in x:\n    %accelerate stacks", "for _ in x:\n        pass  # %accelerate stacks"),
    ],
)
def test_a_command_is_a_call_where_it_stands(tmp_path, line, code):
    text = script(tmp_path, "%%accelerate --local\nx = y = [1]\ndef f(*args, **more): ...", line).text
    assert code in text


def test_every_command_is_known_here(tmp_path):
    for command in line_commands():
        rest = {"push": "x", "pull": "x", "run": "f()"}.get(command.word, "")
        assert problems_of(tmp_path, f"x = 1\ndef f(): ...\n%accelerate {command.word} {rest}".rstrip()) == ""


def test_what_is_pulled_is_computed_and_what_needs_it_is_guarded(tmp_path):
    text = script(tmp_path, "%%accelerate\nx = 1", "%accelerate pull x", "class A:\n    y = x + 1").text
    guarded = text[text.index("# %% [3]") :].split("\n")
    assert guarded[1:3] == ['if __name__ == "__main__":  # +', "    class A:"]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["x = 1\n%%accelerate -n 2"], "cell 1, line 2: %%accelerate is below other lines"),
        (["# two\n%%accelerate -n 2\nx = 1"], "cell 1, line 2: %%accelerate is below other lines"),
        (["%%accelerate --rangs 0\nx = 1"], "cell 1, line 1: %%accelerate was given --rangs"),
        (["%%accelerate -n 2 --ranks 2\nx = 1"], "line 1: --ranks was given '2', and the session has the ranks 0-1"),
        (["%%accelerate\nx = 1", "%%accelerate --restart\nx = 1"], "cell 2, line 1: the session would restart"),
        (["%%accelerate -n 2\nx = 1", "%%accelerate -n 4\nx = 1"], "num_processes was 2 and is 4 now"),
        ([BEGIN, "%%accelerate --cpu\nx = 1"], "cell 2, line 1: the session would restart here (cpu was False"),
        (["%%accelerate\nx = 1", "y = 1\n%accelerate restart"], "cell 2, line 2: the session would restart"),
        ([BEGIN, "%accelerate stop", BEGIN], "cell 2, line 1: the session is stopped here, and cell 3"),
        (["%%accelerate\n%accelerate push x"], "cell 1, line 2: %accelerate is in a %%accelerate cell"),
        (["%%accelerate\n\nx = = 1"], "cell 1, line 3: `x = = 1` is no Python"),
        (["%accelerate pusch x"], "cell 1, line 1: %accelerate was given 'pusch'. Did you mean push?"),
        (["%accelerate push"], "cell 1, line 1: %accelerate push was given no name"),
        (["%accelerate run f"], "cell 1, line 1: %accelerate run was given 'f', which is no call"),
        (["x = %accelerate status"], "cell 1, line 1: x = %accelerate status keeps what a script does not have"),
    ],
)
def test_what_a_script_can_t_do_is_reported_with_its_cell_and_line(tmp_path, sources, message):
    assert message in problems_of(tmp_path, *sources)


@pytest.mark.parametrize(
    "sources",
    [
        [f"%%accelerate {flags}\nx = 1" for flags in ("-n 2 --restart", "-n 2", "--no-cpu --hang-warning-after 5")],
        ["%%accelerate --name a\nx = 1", "%%accelerate --name b --tags c\nx = 1"],
        ["%accelerate stop", "%%accelerate\nx = 1"],
        ["%%accelerate\nx = 1", "%accelerate stop", "y = 1", "%accelerate stop"],
        ["%accelerate restart -n 2", "%%accelerate\nx = 1"],
        ["%%accelerate?", "%%accelerate --help\n"],
    ],
)
def test_what_keeps_the_session_as_it_is_can_be_set_again(tmp_path, sources):
    assert problems_of(tmp_path, *sources) == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("%%accelerate --background --timeout 3\nx = 1", "cell 1, line 1: --background was left out"),
        ("%%accelerate --background --timeout 3\nx = 1", "cell 1, line 1: --timeout was left out"),
        ("%%accelerate --detach\nx = 1", "cell 1, line 1: --detach was left out"),
        ("%accelerate config", "cell 1, line 1: %accelerate config was left out: pass the settings"),
    ],
)
def test_what_a_person_should_know_is_noted(tmp_path, source, message):
    assert message in "\n".join(script(tmp_path, source).notes)
