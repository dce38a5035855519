"""`%%accelerate` and `%accelerate` in a shell: registered, completed, explained, and refused where they make no sense."""

import re
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import IPython
import numpy as np
import pytest
from IPython.core.completer import provisionalcompleter

from accelerate_nb.config.magic_args import CellOptions, cell_flags, line_commands
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.launching.session import CellResult
from accelerate_nb.notebook import magics
from accelerate_nb.notebook.cells import session_manager
from accelerate_nb.notebook.cells.commands import described
from accelerate_nb.notebook.cells.session_manager import NotebookSession
from tests.kernel.kernels import without_colours
from tests.notebook.cells.test_cell_output import Desk
from tests.notebook.paper import Paper, line
from tests.reports.kept_run import keep


@pytest.fixture
def shell(one_shell):
    magics.register(one_shell)
    yield one_shell
    magics.unregister(one_shell)


def completed(shell, text):
    if IPython.version_info < (8, 6):
        pytest.skip("IPython asks others for completions from 8.6 on")
    with provisionalcompleter():
        return [completion.text for completion in shell.Completer.completions(text, len(text))]


def failed(shell, cell, capsys):
    """What a person reads of a cell that fails, and its error."""
    result = shell.run_cell(cell, store_history=True)
    assert result.error_in_exec is not None
    return without_colours(capsys.readouterr().out), result.error_in_exec


def test_registered_twice_it_is_one_pair_with_one_session(shell):
    first = shell.find_cell_magic("accelerate")
    magics.register(shell)
    assert shell.find_cell_magic("accelerate").kept is first.kept
    assert len(shell.Completer.custom_matchers) == (IPython.version_info >= (8, 6))


def test_unregistered_it_is_gone(shell):
    magics.unregister(shell)
    assert shell.find_cell_magic("accelerate") is None
    assert shell.find_line_magic("accelerate") is None
    assert "--restart" not in completed(shell, "%%accelerate --fr")
    magics.unregister(shell)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("%%accelerate --mix", ["--mixed-precision"]),
        ("%%accelerate -n 2 --mixed-precision b", ["bf16"]),
        ("%%accelerate --start-method ", ["auto", "fork", "spawn", "supervisor"]),
        ("%accelerate st", ["stacks", "status", "stop"]),
        ("%accelerate pull --", ["--all", "--rank"]),
        ("%accelerate restart --mixed-precision f", ["fp16", "fp8"]),
        ("%%accelerate --mixed-precision=b", ["bf16"]),
        ("%%accelerate --mixed-precision bf16 --mix", []),
        ("%%accelerate -n 2 --displays ", ["all", "main"]),
        ("%%accelerate --res", ["--restart"]),
        ("x = %accelerate pu", ["pull", "push"]),
    ],
)
def test_flags_values_and_commands_are_completed(shell, text, found):
    assert sorted(completed(shell, text)) == found


def test_an_empty_line_offers_every_flag(shell):
    assert {cell_flag.flag for cell_flag in cell_flags()} <= set(completed(shell, "%%accelerate "))


def test_names_of_the_notebook_are_completed_where_they_can_stand(shell):
    shell.user_ns["learning_rate"] = 0.1
    assert completed(shell, "%accelerate push learn") == ["learning_rate"]
    assert "learning_rate" in completed(shell, "%accelerate run print(learn")


def test_names_of_the_ranks_are_completed_where_they_are_pulled(shell):
    shell.user_ns["learning_rate"] = 0.1
    shell.find_cell_magic("accelerate").kept.session = SimpleNamespace(names=("weights", "steps"))
    try:
        assert completed(shell, "%accelerate pull w") == ["weights"]
        assert completed(shell, "%accelerate pull learn") == []
    finally:
        shell.find_cell_magic("accelerate").kept.session = None


def test_the_help_of_both_lists_every_flag_and_every_command(shell, capsys):
    shell.run_cell("%accelerate --help")
    lines = capsys.readouterr().out
    assert all(line_command.word in lines and line_command.help in lines for line_command in line_commands())
    shell.run_cell("%%accelerate --help\npass")
    cell = capsys.readouterr().out
    assert all(cell_flag.flag in cell and cell_flag.help in cell for cell_flag in cell_flags())
    assert "  -n, --num-processes N\n      Number of processes" in cell
    assert "--mixed-precision {no,fp16,bf16,fp8}" in cell
    assert "(default: auto)" in cell
    assert shell.find_cell_magic("accelerate").getdoc() == cell.rstrip("\n")


@pytest.mark.parametrize("name", ["%%accelerate", "%accelerate"])
def test_a_question_mark_shows_the_help(shell, name):
    text = shell.object_inspect_mime(name)["text/plain"]
    assert "a session, which keeps" in text or "Manage the session" in text
    assert ("--mixed-precision" in text) == (name == "%%accelerate")


def test_a_syntax_error_looks_as_in_any_cell_and_no_session_starts(shell, capsys):
    output, error = failed(shell, "%%accelerate\nx = 1\n\ny = = 2\n", capsys)
    assert isinstance(error, LaunchError)
    assert re.search(r"(line |:)4\b", output)
    assert "y = = 2" in output
    assert "SyntaxError: invalid syntax" in output
    assert "magic.py" not in output
    assert shell.find_cell_magic("accelerate").kept.session is None


@pytest.mark.parametrize("above", ["", "\n\n", "# a comment\n"])
def test_lines_above_the_code_count(shell, capsys, above):
    output, _ = failed(shell, f"%%accelerate\n{above}y = = 2\n", capsys)
    assert re.search(rf"(line |:){2 + above.count(chr(10))}\b", output)


@pytest.mark.parametrize("code", ["%pwd", "!true", "await accelerator", "x = !ls", "%%time\nx = 1"])
def test_what_only_a_notebook_understands_is_no_syntax_error(shell, code):
    magics.CellCode(shell, code).check()


def test_errors_of_ours_are_reported_shortly(shell, capsys):
    output, error = failed(shell, "%%accelerate --mixed-precison bf16\npass", capsys)
    assert isinstance(error, ConfigurationError)
    assert "Did you mean --mixed-precision?" in output
    assert len(output.splitlines()) == 1
    output, _ = failed(shell, "from accelerate_nb import launch\nlaunch(print, num_proceses=2)", capsys)
    assert "Did you mean num_processes?" in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.parametrize("flag", ["--local", "--background", "--restart", "--ranks 0"])
def test_what_belongs_to_a_session_is_refused_with_detach(shell, capsys, flag):
    assert "was given with --detach" in failed(shell, f"%%accelerate -n 2 --detach {flag}\n1", capsys)[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stat", "Did you mean status?"),
        ("zzz", "It knows status, stop, restart"),
        ("pull x", "there is no session. A cell with %%accelerate starts one."),
        ("stacks", "there is no session"),
        ("logs", "there is no session"),
        ("push", "was given no name"),
        ("push a+b", "was given 'a+b'"),
        ("push learning_rat", "Did you mean learning_rate?"),
        ("run learning_rate", "which is no call"),
        ("run train(1)", "which the notebook does not know. Define it"),
        ("status now", "It takes nothing."),
        ("pull x --rnk 1", "Did you mean --rank?"),
        ('runs "a', "a quotation mark is open"),
    ],
)
def test_a_command_that_makes_no_sense_reports_what_would(shell, capsys, line, message):
    shell.user_ns["learning_rate"] = 0.1
    output, _ = failed(shell, f"%accelerate {line}", capsys)
    assert message in output


def test_without_a_session_its_status_reports_how_to_start_one(shell, capsys):
    shell.run_cell("%accelerate\n")
    assert "No session. A cell with %%accelerate starts one." in capsys.readouterr().out
    shell.run_cell("%accelerate stop")
    assert "There is no session to stop." in capsys.readouterr().out


def test_a_form_takes_back_what_the_file_sets(shell, default_file):
    default_file.write_text("use_cpu: true\n")
    shell.run_line_magic("accelerate", "config").set(cpu=False)
    assert shell.find_cell_magic("accelerate").kept.picked()["cpu"] is False


def test_code_that_runs_here_too_shows_its_value_and_its_own_lines(shell, capsys):
    magics.CellCode(shell, "x = 40\nx + 2").run_locally()
    assert shell.user_ns["x"] == 40
    assert "42" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError) as raised:
        magics.CellCode(shell, "def f():\n    return 1 / 0\nf()").run_locally()
    text = without_colours("\n".join(raised.value._render_traceback_()))
    assert "return 1 / 0" in text
    assert "was not run on the ranks" in text
    assert "cell_code.py" not in text
    with pytest.raises(ConfigurationError, match="awaits"):
        magics.CellCode(shell, "await f()").run_locally()


def test_a_start_that_takes_a_while_reports_it_meanwhile(monkeypatch):
    messages, has_message = [], threading.Event()

    def record(text):
        messages.append(text)
        has_message.set()

    def start(config):
        assert has_message.wait(30)
        return SimpleNamespace(size=2, why="2 on the CPU", alive=True)

    monkeypatch.setattr(session_manager, "print_message", record)
    monkeypatch.setattr(session_manager.Session, "start", start)
    NotebookSession().ready({"num_processes": 2, "cpu": True})
    assert messages[0] == "starting 2 processes…"
    assert messages[1].startswith("2 processes are ready after")


def test_no_session_starts_in_a_worker(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="inside rank 1 of 2"):
        NotebookSession().ready()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a" * 100, "str of length 100"),
        ([1, 2], "[1, 2]"),
        (list(range(100)), "list of length 100"),
        (np.zeros((2, 3), "float32"), "ndarray of shape (2, 3), float32"),
        (np.array("a" * 100), "ndarray"),
        (Mock(__repr__=Mock(side_effect=ValueError)), "Mock"),
    ],
)
def test_a_value_is_described_in_a_few_words(value, text):
    assert described(value) == text


def test_runs_that_are_named_are_compared(shell, tmp_path, monkeypatch):
    for number, lr in enumerate((0.05, 0.1)):
        keep(tmp_path, f"run{number}", float(number), lr)
    monkeypatch.setenv("ACCELERATE_NB_FOLDER", str(tmp_path))
    assert len(shell.run_line_magic("accelerate", "runs")) == 2
    assert "−0.45 (−75 %)" in repr(shell.run_line_magic("accelerate", "runs run0 run1"))
    with pytest.raises(ConfigurationError, match="Near to it"):
        shell.run_line_magic("accelerate", "runs run0 rum1")


def test_the_last_lines_of_a_background_cell_come_before_those_of_the_next_cell():
    may_draw = threading.Event()

    class LatePaper(Paper):
        def write(self, lines):
            assert may_draw.wait(20)
            super().write(lines)

    desk = Desk(size=1, at=LatePaper(), outlives_wait=True)
    desk.run.follow()
    desk.feed(line("late"))
    desk.control.ended = {0: CellResult(0)}
    desk.control.finish(None)
    kept = NotebookSession(background=desk.run, background_output=desk.front_end)
    magic = magics.AccelerateCellMagic(None, kept, lambda: None)
    waiting = threading.Thread(target=magic._wait_for_background, args=(CellOptions(),), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    may_draw.set()
    waiting.join(20)
    assert desk.paper.texts == ["[0] late"]
