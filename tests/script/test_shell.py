"""What commands of a script do: once on each machine, whoever comes first, and nobody waits for ever."""

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accelerate_nb.script import shell
from tests.processes import python

LAUNCHED = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "TORCHELASTIC_RUN_ID": "test"}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def on_ranks(code: str, *, ranks: int = 3, **more: str) -> list[subprocess.CompletedProcess[str]]:
    """The same file in processes that a launcher started beside each other."""
    Path("script.py").write_text(f"import os, sys\nfrom accelerate_nb.script import shell as nb_shell\n{code}\n")
    variables = {**LAUNCHED, "TMPDIR": os.getcwd(), "LOCAL_WORLD_SIZE": str(ranks), **more}
    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(lambda rank: python("script.py", **variables, LOCAL_RANK=str(rank)), range(ranks))]


def test_a_command_runs_once_on_a_machine_and_everybody_waits_for_its_end() -> None:
    done = on_ranks(
        "for number in range(3):\n"
        "    nb_shell.run(f'for i in 1 2 3 4 5 6 7 8 9; do echo {number} >> lines; done; echo said {number}')\n"
        "    seen = open('lines').read().split().count(str(number))\n"
        "    assert seen == 9, seen\n"
        "nb_shell.cell('writefile', '-a written', 'a')\n"
        "nb_shell.cell('bash', '', 'echo b >> written')\n"
        "assert open('written').read() == 'a\\nb\\n'\n"
    )
    assert [item.stderr for item in done] == ["", "", ""]
    output = "".join(item.stdout for item in done)
    assert sorted(output.split("\n")) == ["", "Writing written", "said 0", "said 1", "said 2"]
    assert Path("lines").read_text().split() == [str(number) for number in range(3) for _ in range(9)]
    assert not list(Path().glob("accelerate-nb-*")), "what was kept for the others is gone"


@pytest.mark.parametrize(("link", "reason"), [(os.link, "a file of this user"), (os.symlink, "symbolic links")])
def test_a_file_that_others_could_write_to_is_not_used(link: Callable[[str, str], None], reason: str) -> None:
    """Whoever shares the machine may have made it, or a link in its place, before."""
    Path("elsewhere").touch()
    link("elsewhere", "accelerate-nb-61")
    known = "from accelerate_nb.script import ranks\nranks.launch_digest = lambda *_: b'a'\n"
    done = on_ranks(f"{known}nb_shell.run('echo once >> lines')", ranks=2)
    assert [item.returncode for item in done] == [1, 1]
    assert all(reason in item.stderr for item in done)
    assert (Path("elsewhere").read_text(), Path("lines").exists()) == ("", False)


def test_every_process_captures_its_own() -> None:
    done = on_ranks("x = nb_shell.capture('echo $LOCAL_RANK')\nprint(x.s)")
    assert [item.stdout for item in done] == [f"{rank}\n" for rank in range(3)]


def test_a_line_that_one_process_only_comes_to_keeps_nobody_waiting() -> None:
    done = on_ranks("if os.environ['LOCAL_RANK'] == '2': nb_shell.run('echo here')\nnb_shell.run('echo all')")
    assert [item.returncode for item in done] == [0, 0, 0]
    assert sorted("".join(item.stdout for item in done).split()) == ["all", "here"]


def test_a_failure_ends_every_process() -> None:
    done = on_ranks("nb_shell.cell('bash', '', 'echo once >> lines; exit 3')")
    assert [item.returncode for item in done] == [1, 1, 1]
    assert sum("returned non-zero exit status 3" in item.stderr for item in done) == 1
    assert sum("ScriptError" in item.stderr and "script.py, line 3" in item.stderr for item in done) == 2
    assert Path("lines").read_text() == "once\n"


def test_nobody_waits_for_a_process_that_is_gone() -> None:
    done = on_ranks("nb_shell.run('kill -9 $PPID; echo once >> lines')", SHELL="/bin/sh")
    assert sorted(item.returncode for item in done) == [-9, 1, 1]
    assert sum("ScriptError" in item.stderr and "script.py, line 3" in item.stderr for item in done) == 2


def test_another_attempt_runs_the_command_again() -> None:
    # rank 1 is never there, so what the first attempt left behind stays
    for attempt in ("0", "1"):
        more = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": attempt}
        (done,) = on_ranks("nb_shell.run('echo once >> lines')", ranks=1, **more)
        assert done.returncode == 0
    assert Path("lines").read_text() == "once\n" * 2


def test_a_command_shows_what_it_prints_where_output_goes(capfd: pytest.CaptureFixture[str]) -> None:
    shell.run("echo a; echo b >&2; exit 3")
    assert capfd.readouterr().out.split() == ["a", "b"]


def test_a_command_in_the_background_is_not_waited_for() -> None:
    # a writer is blocked until somebody reads
    os.mkfifo("first")
    os.mkfifo("second")
    shell.run("echo waiting > first &")
    shell.cell("bash", "--bg", "echo waiting > second")
    assert Path("first").read_text() == Path("second").read_text() == "waiting\n"
