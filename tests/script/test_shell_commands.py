"""What commands of a script do: once on each machine, whoever comes first, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.script import run_file, shell_commands

LAUNCHED = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "TORCHELASTIC_RUN_ID": "test"}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def on_ranks(code: str, *, ranks: int = 3, **more: str) -> list[subprocess.CompletedProcess[str]]:
    """The same file in processes that a launcher started beside each other."""
    Path("script.py").write_text(
        f"import os, sys\nfrom accelerate_nb.script import shell_commands as nb_shell\n{code}\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            env={
                **os.environ,
                **LAUNCHED,
                "TMPDIR": os.getcwd(),
                "LOCAL_WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                **more,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, out, err)
        for process, (out, err) in zip(processes, outputs, strict=True)
    ]


def test_a_command_runs_once_on_a_machine_and_everybody_waits_for_its_end() -> None:
    done = on_ranks(
        "for number in range(3):\n"
        "    nb_shell.run(f'for i in 1 2 3 4 5 6 7 8 9; do echo {number} >> lines; done; echo said {number}')\n"
        "    seen = open('lines').read().split().count(str(number))\n"
        "    assert seen == 9, seen\n"
        "nb_shell.write_file('written', 'a', append=True)\n"
        "nb_shell.cell('bash', 'echo b >> written')\n"
        "assert open('written').read() == 'a\\nb\\n'\n"
    )
    assert [item.stderr for item in done] == ["", "", ""]
    output = "".join(item.stdout for item in done)
    assert sorted(output.split("\n")) == ["", "Writing written", "said 0", "said 1", "said 2"]
    assert Path("lines").read_text().split() == [str(number) for number in range(3) for _ in range(9)]
    assert not list(Path(f"accelerate-nb-once-{os.getuid()}").iterdir()), "what was kept for the others is gone"


def test_a_folder_that_others_could_write_to_is_not_used() -> None:
    """Whoever shares the machine may have made it, or a link in its place, before."""
    Path("elsewhere").mkdir()
    Path(f"accelerate-nb-once-{os.getuid()}").symlink_to("elsewhere")
    done = on_ranks("nb_shell.run('echo once >> lines')", ranks=2)
    assert [item.returncode for item in done] == [1, 1]
    assert all("ScriptError" in item.stderr and "no other user can write to" in item.stderr for item in done)
    assert not Path("lines").exists()


def test_every_process_runs_its_own_where_that_is_requested() -> None:
    done = on_ranks(
        "nb_shell.run('echo $LOCAL_RANK', every=True)\nx = nb_shell.capture('echo $LOCAL_RANK')\nprint(x.s)"
    )
    assert [item.stdout for item in done] == [f"{rank}\n{rank}\n" for rank in range(3)]


def test_a_line_that_one_process_only_comes_to_keeps_nobody_waiting() -> None:
    done = on_ranks("if os.environ['LOCAL_RANK'] == '2': nb_shell.run('echo here')\nnb_shell.run('echo all')")
    assert [item.returncode for item in done] == [0, 0, 0]
    assert sorted("".join(item.stdout for item in done).split()) == ["all", "here"]


def test_a_failure_is_one_in_every_process() -> None:
    done = on_ranks("nb_shell.cell('bash', 'echo once >> lines; exit 3')")
    assert all("CalledProcessError: Command 'bash' returned non-zero exit status 3" in item.stderr for item in done)
    assert Path("lines").read_text() == "once\n"


def test_nobody_waits_for_a_process_that_is_gone() -> None:
    done = on_ranks("nb_shell.run('kill -9 $PPID; echo once >> lines')", SHELL="/bin/sh")
    assert sorted(item.returncode for item in done) == [-9, 1, 1]
    assert sum("ScriptError" in item.stderr and "script.py, line 3" in item.stderr for item in done) == 2


def test_another_attempt_runs_the_command_again() -> None:
    # rank 1 is never there, so what the first attempt left behind stays
    for attempt in ("0", "1"):
        env = {**os.environ, **LAUNCHED, "TMPDIR": os.getcwd(), "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        code = "from accelerate_nb.script.shell_commands import run\nrun('echo once >> lines')"
        subprocess.run([sys.executable, "-c", code], env={**env, "TORCHELASTIC_RESTART_COUNT": attempt}, check=True)
    assert Path("lines").read_text() == "once\n" * 2


def test_a_command_shows_what_it_prints_where_output_goes(capfd: pytest.CaptureFixture[str]) -> None:
    shell_commands.run("echo a; echo b >&2; exit 3")
    assert capfd.readouterr().out.split() == ["a", "b"]


def test_a_command_in_the_background_is_not_waited_for() -> None:
    # a writer is blocked until somebody reads
    os.mkfifo("first")
    os.mkfifo("second")
    shell_commands.run("echo waiting > first &")
    shell_commands.cell("bash", "echo waiting > second", background=True)
    assert Path("first").read_text() == Path("second").read_text() == "waiting\n"


def test_captured_lines_are_a_list_with_ipython_s_views() -> None:
    lines = shell_commands.capture("echo a; echo b >&2; exit 1")
    assert (list(lines), lines.n, lines.s, lines.l) == (["a", "b"], "a\nb", "a b", lines)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("cp {x} $x $x.real {x + 1}", "cp 1 1 1 2"),
        ("echo $HOME {x}", "echo $HOME {x}"),
        ("mkdir {x,y}", "mkdir {x,y}"),
        ("awk '{print $1}'", "awk '{print $1}'"),
        ("echo {{x}} $$x", "echo {x} $x"),
        ("echo {1 / 0}", "echo {1 / 0}"),
    ],
)
def test_names_are_expanded_where_all_of_them_have_values(command: str, text: str) -> None:
    assert shell_commands.expanded(command, {"x": 1}) == text


def test_cells_give_back_what_is_requested() -> None:
    text = "echo out; echo err >&2; exit 1"
    kept: list[Any] = [shell_commands.output_of("bash", text, keep, fails=False) for keep in ("out", "err", "both")]
    assert kept == ["out\n", "err\n", ("out\n", "err\n")]
    with pytest.raises(subprocess.CalledProcessError):
        shell_commands.output_of("bash", text)


def test_cd_goes_back_and_prints_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLDPWD", "/")
    folder = os.getcwd()
    Path("inner").mkdir()
    shell_commands.cd("inner")
    shell_commands.cd("-", quiet=True)
    shell_commands.cd("nowhere", quiet=True)
    assert os.getcwd() == folder
    assert capsys.readouterr().out.split("\n")[:2] == [
        f"{folder}/inner",
        "[Errno 2] No such file or directory: 'nowhere'",
    ]


def test_a_program_runs_with_its_arguments_and_leaves_its_names() -> None:
    Path("program.py").write_text(
        "import sys, __main__\n_words = sys.argv[1:]\nmine = __main__ is sys.modules[__name__]\nvalue = len(_words)\n"
    )
    before, names = sys.argv, {"value": 0, "__name__": "mine"}
    run_file.run_file("program.py", ["a", "b"], names)
    assert (names["value"], names["mine"], names["__name__"]) == (2, True, "mine")
    assert sys.argv is before


def test_a_program_may_end_itself_and_its_error_is_raised() -> None:
    names: dict[str, Any] = {}
    Path("ends.py").write_text("import sys\nx = 1\nsys.exit(2)")
    with pytest.raises(SystemExit):
        run_file.run_file("ends.py", [], {})
    run_file.run_file("ends", [], names, exits=False)
    assert names["x"] == 1
    with pytest.raises(Exception, match=r"nowhere\.py.* not found"):
        run_file.run_file("nowhere.py", [], names)


def test_a_module_runs_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    run_file.run_file("this", [], {}, is_module=True)
    assert "Zen of Python" in capsys.readouterr().out


def test_a_notebook_runs_with_the_names_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # a script names cells in its tracebacks
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cells = [
        {**code, "id": str(number), "source": text} for number, text in enumerate(("y = x + 1\n!echo {y}", "z = y"))
    ]
    Path("book.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    names: dict[str, Any] = {"x": 1, "__name__": "__main__"}
    run_file.run_file("book.ipynb", [], names)
    assert (names["y"], names["z"]) == (2, 2)


def test_words_stand_for_the_files_that_they_match() -> None:
    for name in ("b.txt", "a.txt"):
        Path(name).touch()
    assert run_file.matching("*.txt") == ["a.txt", "b.txt"]
    assert run_file.matching("*.none") == ["*.none"]
