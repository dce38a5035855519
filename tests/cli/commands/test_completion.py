"""Real shells complete the commands, their flags and their choices."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from accelerate_nb.cli.commands.completion import script
from accelerate_nb.cli.main import COMMANDS, main

# Calls the function that completes, as bash does when the tab key is pressed behind these words.
PRESS = """
source "$1"; shift
complete -p accelerate-nb >/dev/null || exit 1
function=$(complete -p accelerate-nb | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
"$function"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def for_bash(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "accelerate-nb"
    file.write_text(script("bash"))
    return file


def completed(file: Path, *words: str, folder: Path | None = None) -> list[str]:
    command = ["bash", "--norc", "-c", PRESS, "bash", str(file), "accelerate-nb", *words]
    return subprocess.check_output(command, text=True, timeout=60, cwd=folder).split()


def test_bash_completes_a_command(for_bash):
    assert completed(for_bash, "la") == ["launch"]
    assert set(completed(for_bash, "")) >= {*COMMANDS}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["launch", "--mixed"], ["--mixed-precision"]),
        (["launch", "--mixed-precision", ""], ["no", "fp16", "bf16", "fp8"]),
        (["test", "--start-method", "s"], ["supervisor", "spawn"]),
        (["estimate-memory", "--optimizer", "sgd"], ["sgd", "sgd-momentum"]),
        (["merge-weights", "--ov"], ["--overwrite"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes_flags_and_choices(for_bash, words, expected):
    assert completed(for_bash, *words) == expected


@pytest.mark.parametrize("words", [["launch"], ["export"], ["test", "--config-file"], ["merge-weights"]])
def test_bash_completes_files(for_bash, tmp_path, words):
    (tmp_path / "train.py").touch()
    assert completed(for_bash, *words, "tr", folder=tmp_path) == ["train.py"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_what_is_printed_is_a_script_of_that_shell(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(word in printed.out for word in COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    file = tmp_path / "script"
    file.write_text(printed.out)
    subprocess.run([shell, "-n", str(file)], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_finds_the_function(tmp_path):
    (tmp_path / "_accelerate-nb").write_text(script("zsh"))
    words = f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path}/dump; print $_comps[accelerate-nb]"
    done = subprocess.run(["zsh", "-fc", words], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "_accelerate-nb"


def test_the_persons_own_shell_is_used_where_none_is_named(monkeypatch, capsys):
    for shell, first in {"/usr/bin/zsh": "#compdef accelerate-nb", "/opt/fish": "# AUTOMATICALLY GENERATED"}.items():
        monkeypatch.setenv("SHELL", shell)
        assert main(["completion"]) == 0
        assert capsys.readouterr().out.startswith(first)


def test_a_terminal_shows_how_to_install_it():
    command = f"{shlex.quote(sys.executable)} -m accelerate_nb.cli.main completion bash 2> errors"
    pexpect.spawn("bash", ["-c", command], timeout=60).expect(pexpect.EOF)
    assert "source <(accelerate-nb completion bash)" in Path("errors").read_text()


def test_an_unknown_shell_is_an_error_that_lists_the_known_ones(capsys):
    assert main(["completion", "fish"]) == 2
    assert "bash" in capsys.readouterr().err
