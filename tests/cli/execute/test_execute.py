"""A notebook is executed without a page, and keeps what its cells gave, however its execution ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from accelerate_nb.cli.execute import execute
from accelerate_nb.cli.execute.kernel_client import CellFailure, kernel_for
from accelerate_nb.cli.execute.notebook_file import sheet, text_of
from accelerate_nb.cli.main import main
from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, ExportError, MissingExtraError
from accelerate_nb.export.notebook import read
from tests.export.making import code, markdown, notebook
from tests.notebooks.executing import printed
from tests.processes import python

COMMAND = [sys.executable, "-m", "accelerate_nb", "launch"]
PYTHON = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
PARAMETERS = """
from pathlib import Path
lr = 0.1  # how far a step goes
epochs: int = 2
data: Path = Path("mnist")
sizes = [1, 2]
shape = (1.0,)
fast = False
name: str | None = None
"""


# ------------------------------------------------------------------------------------------------------- one execution

TRAIN = """
%load_ext accelerate_nb
from accelerate_nb import notebook_launcher, launch
def train():
    from accelerate_nb import Accelerator
    accelerator = Accelerator()
    accelerator.log({"loss": 0.5}, step=0)
    print("a line of rank", accelerator.process_index)
    return accelerator.num_processes
"""
CELLS = [
    markdown("# A training"),
    code(PARAMETERS, "parameters"),
    code("lr = 7", "injected-parameters"),
    TRAIN,
    "notebook_launcher(train)",
    "notebook_launcher(train, num_processes=1, panel='text')",
    "%%accelerate\nprint('size', world_size)",
    "run = launch(train)",
    "(run.wait(), lr, epochs, str(data))",
    code("1 / 0", "raises-exception"),
    code("print('skipped')", "skip-execution"),
    "import os, sys\nprint('to', 'stderr', file=sys.stderr)\nprint(os.getcwd())\ndef fails():\n    raise KeyError('x')",
    "\nfails()",
    "print('never')",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, subprocess.CompletedProcess[str], Path]:
    """A notebook after its execution, the command that executed it, and its folder."""
    folder = tmp_path_factory.mktemp("executed")
    (folder / "work").mkdir()
    kernel = {"name": "of-somebody", "display_name": "Somebody's", "language": "python"}
    notebook(folder / "work" / "train.ipynb", *CELLS, kernelspec=kernel)
    words = ["work/train.ipynb", "--execute", "-o", "out.ipynb", "--cpu", "-n", "2"]
    words += ["--", "--lr", "3e-4", "--epochs", "5"]
    folders = {"HF_HOME": str(folder / "home"), "ACCELERATE_NB_FOLDER": str(folder / "runs")}
    ended = python(*COMMAND[1:], *words, folder=folder, **folders, ACCELERATE_NB_TIMEOUT="90")
    assert (folder / "out.ipynb").exists(), ended.stderr
    return nbformat.read(folder / "out.ipynb", as_version=4), ended, folder


@pytest.fixture
def executed(done: tuple[Any, ...]) -> Any:
    return done[0]


def test_the_parameters_stand_in_a_cell_behind_their_own_in_place_of_former_ones(executed):
    tags = [cell.metadata.get("tags", []) for cell in executed.cells]
    assert tags[1:3] == [["parameters"], ["injected-parameters"]]
    assert executed.cells[2].source == "# Parameters\nlr = 0.0003\nepochs = 5"
    assert sum("injected-parameters" in tag for tag in tags) == 1
    assert executed.cells[8].outputs[0].data["text/plain"] == "(2, 0.0003, 5, 'mnist')"


def test_a_launch_leaves_its_report_with_a_row_for_each_rank_and_no_widget(executed):
    report = executed.cells[4].outputs[0]
    assert sorted(report.data) == ["text/html", "text/plain"]
    assert report.data["text/html"].count("✔ finished") == 1 + 2  # of the run, and of its ranks
    assert "a line of rank 1" in report.data["text/html"]
    assert executed.cells[4].outputs[1].data["text/plain"] == "2"
    assert "widgets" not in executed.metadata
    # so does a run in the background, in the cell that began it
    assert "✔ finished" in executed.cells[7].outputs[0].data["text/plain"]


def test_settings_hold_for_cells_on_every_rank_and_what_the_notebook_sets_itself_wins(executed):
    assert "[0-1] size 2\n" in printed(executed.cells[6])
    assert [output.output_type for output in executed.cells[5].outputs][-1] == "execute_result"
    assert "a line of rank 0" in printed(executed.cells[5])
    assert executed.cells[5].outputs[-1].data["text/plain"] == "1"


def test_tags_let_a_cell_raise_or_be_skipped(executed):
    assert executed.cells[9].outputs[0].ename == "ZeroDivisionError"
    assert (executed.cells[10].outputs, executed.cells[10].execution_count) == ([], None)
    assert executed.cells[11].execution_count == 10


def test_an_error_ends_it_and_is_named_with_cell_and_line(done):
    executed, ended, _ = done
    assert ended.returncode == 1
    assert "train.ipynb, cell 11, line 2 (raised in cell 10, line 5): KeyError: 'x'" in ended.stderr
    assert executed.cells[12].outputs[0].ename == "KeyError"
    assert executed.cells[13].outputs == []


def test_the_terminal_sees_which_cell_runs_and_what_it_writes(done):
    _, ended, folder = done
    assert "cell 4 of 12: notebook_launcher(train)\n" in ended.stderr
    assert "to stderr\n" in ended.stderr
    assert f"{folder / 'work'}\n" in ended.stdout  # a notebook works where it lies
    assert "\x1b[" not in ended.stdout + ended.stderr


def test_a_kernel_that_is_not_installed_is_replaced_by_this_python(done):
    executed, ended, _ = done
    assert f"names the kernel 'of-somebody', which is not installed here; {sys.executable} executes it" in ended.stderr
    assert executed.metadata.kernelspec.name == "of-somebody"
    assert executed.metadata.language_info.version == ".".join(map(str, sys.version_info[:3]))


def test_the_notebook_itself_stays_and_nothing_else_is_left(done):
    _, _, folder = done
    assert os.listdir(folder / "work") == ["train.ipynb"]
    source = nbformat.read(folder / "work" / "train.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in source.cells)


# ------------------------------------------------------------------------------------------------------------- signals


def started(folder: Path, *cells: str) -> tuple[subprocess.Popen[str], Path]:
    """A command that executes such a notebook in place."""
    path = notebook(folder / "waits.ipynb", *cells)
    words = [*COMMAND, str(path), "--execute", "--cpu", "-n", "2"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True), path


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """The next line with this text among those that a command writes."""
    return next(line for line in process.stdout if text in line)


def gone(pids: list[int]) -> bool:
    """Whether these processes have ended."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    return not alive


WAITS = """def waits():
    import os, time
    print('pid', os.getpid(), flush=True)
    time.sleep(600)
from accelerate_nb import notebook_launcher
print('kernel', os.getpid())
notebook_launcher(waits, panel='text', stop_grace_period=0.5)"""


@pytest.mark.slow
def test_an_interrupt_ends_the_ranks_and_the_kernel_and_keeps_what_was_executed(folder):
    process, path = started(folder, "import os\n6 * 7", WAITS, "print('never')")
    pids = [int(line_with(process, "kernel").split()[-1])]
    pids += [int(line_with(process, "pid").split()[-1]) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert gone(pids)
    executed = nbformat.read(path, as_version=4)
    assert executed.cells[0].outputs[0].data["text/plain"] == "42"
    assert executed.cells[1].outputs[-1].ename == "KeyboardInterrupt"
    assert (executed.cells[2].outputs, executed.cells[2].execution_count) == ([], None)


@pytest.mark.slow
def test_a_second_signal_kills_a_kernel_that_does_not_stop(folder):
    stubborn = "import os, time\nprint('kernel', os.getpid())\nwhile True:\n    try:\n        time.sleep(600)\n"
    process, path = started(folder, stubborn + "    except KeyboardInterrupt:\n        print('no')")
    kernel = int(line_with(process, "kernel").split()[-1])
    process.send_signal(signal.SIGTERM)
    line_with(process, "no")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 143
    assert gone([kernel])
    assert nbformat.read(path, as_version=4).cells[0].outputs[-1].evalue.startswith("The kernel was killed")


# ---------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--lr", "1e-3"], {"lr": 1e-3}),
        (["--lr", "inf"], {"lr": float("inf")}),
        (["--data", "it's"], {"data": Path("it's")}),
        (["--sizes", "3", "4", "--fast"], {"sizes": [3, 4], "fast": True}),
        (["--shape", "3"], {"shape": (3.0,)}),
        (["--shape"], {"shape": ()}),
        (["--name", "a\nb"], {"name": "a\nb"}),
        (["--name", "None"], {"name": None}),
    ],
)
def test_a_parameters_cell_gives_what_the_command_line_sets(tmp_path, words, values):
    path = notebook(tmp_path / "a.ipynb", code(PARAMETERS, "parameters"))
    parameters = execute.parameter_values(read(path), words)
    assert parameters == values
    names: dict[str, Any] = {}
    exec(execute.source_of(parameters), names)
    assert {name: names[name] for name in values} == values


def test_a_wrong_parameter_ends_the_command_before_a_kernel_starts(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", code(PARAMETERS, "parameters"))
    with pytest.raises(SystemExit) as end:
        main(["launch", str(path), "--execute", "--", "--learning-rate", "1"])
    assert end.value.code == 2
    assert "there is no option --learning-rate" in capsys.readouterr().err
    bare = notebook(tmp_path / "b.ipynb", "lr = 1")
    with pytest.raises(ConfigurationError, match=r"'--lr' was given, but b.ipynb has no parameters"):
        execute.parameter_values(read(bare), ["--lr", "1"])
    wrong = notebook(tmp_path / "c.ipynb", code("x = 1\nlr = open('a')", "parameters"))
    with pytest.raises(ExportError, match=r"c.ipynb, cell 1, line 2: .* no literal"):
        execute.parameter_values(read(wrong), ["--x", "1"])
    assert execute.parameter_values(read(wrong), []) == {}


# ------------------------------------------------------------------------------------------------------------ settings


def test_settings_reach_the_kernel_as_variables_of_the_same_values(tmp_path):
    settings = {"num_processes": 3, "cpu": True, "folder": "runs", "mixed_precision": "bf16"}
    found = execute.kernel_environment(settings, "file.yaml", "auto", {})
    config = resolve({}, found)
    assert (config.launching.num_processes, config.launching.cpu, config.training.mixed_precision) == (3, True, "bf16")
    assert (config.launching.folder, config.launching.panel) == (str(tmp_path / "runs"), "html")
    assert found["ACCELERATE_NB_CONFIG_FILE"] == str(tmp_path / "file.yaml")


def test_a_panel_that_was_set_anywhere_stays(tmp_path, monkeypatch):
    found = execute.kernel_environment({"panel": "text"}, "", "text", {})
    assert found == {"ACCELERATE_NB_PANEL": "text", "ACCELERATE_NB_CONFIG_FILE": ""}
    path = notebook(tmp_path / "a.ipynb")
    assert execute.request(path).environment == {"ACCELERATE_NB_PANEL": "html"}
    monkeypatch.setenv("ACCELERATE_NB_PANEL", "off")
    assert execute.request(path).environment == {}


def test_a_dry_run_prints_and_starts_nothing(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", code("lr = 1", "parameters"))
    before = path.read_bytes()
    assert main(["launch", str(path), "--execute", "--dry-run", "-n", "2", "--", "--lr", "2"]) == 0
    output = capsys.readouterr().out
    assert "would be executed: 1 code cell, in" in output
    assert "lr = 2\n" in output
    assert "ACCELERATE_NB_NUM_PROCESSES=2\n" in output
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "a.ipynb", "--execute", "-o", "a.py"], "which is no notebook's name"),
        (["launch", "a.ipynb", "--execute", "-o", "folder.ipynb"], "which is a folder"),
        (["launch", "a.ipynb", "--execute", "-o", "missing/a.ipynb"], "and there is no folder"),
        (["launch", "a.ipynb", "-o", "b.ipynb"], "Add --execute"),
        (["launch", "a.ipynb", "--execute", "--only-rank", "0"], "--only-rank"),
        (["launch", "--execute", "a.py"], "only a notebook can be executed"),
        (["export", "a.ipynb", "--execute", "--stdout"], "Name a file with -o"),
    ],
)
def test_what_can_not_be_is_refused_before_a_kernel_starts(tmp_path, capsys, words, message):
    notebook(tmp_path / "a.ipynb", "1")
    (tmp_path / "a.py").touch()
    (tmp_path / "folder.ipynb").mkdir()
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_missing_package_names_its_extra(tmp_path, monkeypatch):
    path = notebook(tmp_path / "a.ipynb", "1")
    monkeypatch.setattr(execute, "find_spec", lambda name: None if name == "nbclient" else True)
    with pytest.raises(MissingExtraError, match=r"needs nbclient, .*pip install 'accelerate-nb\[execute\]'"):
        execute.run(execute.request(path))


# -------------------------------------------------------------------------------------------------------------- sheets


@pytest.mark.parametrize("form", ["3", "4.2", "no ids", "broken"])
def test_an_old_or_broken_notebook_is_written_as_a_valid_one(tmp_path, form):
    old = {"execution_count": 7, "outputs": [nbformat.v4.new_output("stream", text="old")]}
    parameters_cell = new_code_cell("lr = 1", metadata={"tags": ["parameters"]}, **old)
    content = new_notebook(cells=[new_markdown_cell("# Title"), parameters_cell], metadata={**PYTHON, "widgets": {}})
    if form == "3":
        content = nbformat.convert(content, 3)
    raw = json.loads(nbformat.writes(content, version=nbformat.NO_CONVERT))
    if form == "4.2":
        raw["nbformat_minor"] = 2
    if form in ("4.2", "no ids"):
        for cell in raw["cells"]:
            del cell["id"]
    if form == "broken":
        raw["cells"][0]["source"] = 3
        raw["cells"][1]["outputs"] = "none"
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(raw), encoding="utf-8-sig")
    made, notes = sheet(read(path), "lr = 2")
    again = nbformat.reads(text_of(made), as_version=nbformat.NO_CONVERT)
    nbformat.validate(again)
    assert again.nbformat == 4
    assert [cell.source for cell in again.cells if cell.cell_type == "code"][-1] == "lr = 2"
    assert all((cell.outputs, cell.execution_count) == ([], None) for cell in again.cells if cell.cell_type == "code")
    assert "widgets" not in again.metadata
    assert len(notes) == (form != "4.2")


def test_a_kernel_of_another_language_is_not_taken(tmp_path, monkeypatch):
    folder = tmp_path / "kernels" / "of-r"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps({"argv": [sys.executable], "display_name": "R", "language": "R"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    content = new_notebook(metadata={"kernelspec": {"name": "of-r", "display_name": "R"}})
    assert kernel_for(content).is_current_python
    assert not kernel_for(new_notebook(metadata=PYTHON)).is_current_python
    assert kernel_for(new_notebook()).notes == ()


def test_a_place_is_reported_as_far_as_it_is_known():
    assert CellFailure(3, "").location() == "cell 3"
    assert CellFailure(3, "", ((3, 2),)).location() == "cell 3, line 2"
