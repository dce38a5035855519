"""`!`, `%%bash`, `%cd` and other shell commands in a script."""

from __future__ import annotations

import codecs
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accelerate_nb.script.once_per_machine import once

if TYPE_CHECKING:
    from IPython.utils.text import SList

# What the text of an expression that can't be evaluated raises; a command that holds one is left as it is.
_NO_EXPRESSION = (SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, ArithmeticError)


def run(command: str, *, every: bool = False) -> None:
    """
    Run a command in a shell, as `!command` does: whatever it prints is shown, and a failure is no error.

    In a launched script one process of each machine runs it while the others wait. With `every` each process runs its own,
    as in cells of %%accelerate.

    >>> run("mkdir -p data")
    """
    _once_unless(every, lambda: _run(command))


def pip(arguments: str, *, every: bool = False) -> None:
    """
    Run pip for the Python that runs the script, as `%pip` does.

    >>> pip("install tqdm")
    """
    run(f"{shlex.quote(sys.executable)} -m pip {arguments}", every=every)


def capture(command: str) -> SList:
    """
    Run a command in a shell, as `x = !command` does: gives the lines that it prints, as a list with `.n`, `.s` and `.l`.

    Every process runs its own.

    >>> capture("echo a; echo b").s
    'a b'
    """
    from IPython.utils.process import getoutput  # type: ignore[attr-defined] # IPython passes it on
    from IPython.utils.text import SList

    return SList(getoutput(command).splitlines())


def expanded(command: str, names: Mapping[str, Any]) -> str:
    """
    A command with `{expression}` and `$name` replaced by values; as it is, if one of them has none.

    >>> expanded("cp $source {folder}/x $HOME", {"source": "a", "folder": "b"})
    'cp $source {folder}/x $HOME'
    """
    from IPython.utils.text import DollarFormatter

    try:
        text: str = DollarFormatter().vformat(command, (), dict(names))
    except _NO_EXPRESSION:
        return command
    return text


def cell(program: str, text: str, *, fails: bool = True, background: bool = False, every: bool = False) -> None:
    """
    Give a text to a program, as `%%bash` and `%%script` do; `subprocess.CalledProcessError` if it fails.

    `fails=False` ignores a failure, and a program in the `background` is not waited for. In a launched script one
    process of each machine does it while the others wait; with `every` each process does.

    >>> cell("bash", "echo hello")
    hello
    """
    words, given = shlex.split(program), _bytes(text)
    code = _once_unless(every, lambda: _start(words, given) if background else _run_with_input(words, given))
    if code and fails:
        raise subprocess.CalledProcessError(code, program)


def output_of(program: str, text: str, keep: Literal["out", "err", "both"] = "out", *, fails: bool = True) -> Any:
    r"""
    Give a text to a program, as `%%bash --out name` does: what it writes is given back, for `"both"` as a tuple.

    Every process does it.

    >>> output_of("bash", "echo hello")
    'hello\n'
    """
    pipes = {name: subprocess.PIPE for name in ("out", "err") if keep in {name, "both"}}
    done = _done(shlex.split(program), _bytes(text), pipes.get("out"), pipes.get("err"))
    if done.returncode and fails:
        raise subprocess.CalledProcessError(done.returncode, program)
    written = {"out": _text(done.stdout), "err": _text(done.stderr)}
    return tuple(written.values()) if keep == "both" else written[keep]


def write_file(path: str, text: str, *, append: bool = False, every: bool = False) -> None:
    """
    Write a text to a file, as `%%writefile` does.

    >>> write_file("/tmp/hello.txt", "hello")
    Writing /tmp/hello.txt
    """
    file = Path(path).expanduser()

    def work() -> int:
        print("Writing" if not file.exists() else "Appending to" if append else "Overwriting", file)
        with file.open("a" if append else "w", encoding="utf-8") as stream:
            stream.write(text if text.endswith("\n") else text + "\n")
        return 0

    _once_unless(every, work)


def cd(folder: str = "~", *, quiet: bool = False) -> None:
    """
    Change this process's folder and print the new one, as `%cd` does; `cd("-")` goes back.

    >>> cd("/")
    /
    """
    former = Path.cwd()
    try:
        os.chdir(os.path.expanduser(os.environ.get("OLDPWD", ".") if folder == "-" else folder))
    except OSError as error:
        print(error)
    else:
        os.environ["OLDPWD"] = str(former)
    if not quiet:
        print(Path.cwd())


def set_env(name: str, value: str) -> None:
    """
    Set a variable of this process's environment and print it, as `%env NAME=value` does.

    >>> set_env("GREETING", "hello")
    env: GREETING=hello
    """
    os.environ[name] = value
    print(f"env: {name}={value}")


def _once_unless(every: bool, work: Callable[[], int]) -> int:
    return work() if every else once(work)


def _run(command: str) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    shell = os.environ.get("SHELL") or None
    # a background program writes at any time, so its output is not read to its end
    if sys.stdout is sys.__stdout__ or command.rstrip().endswith("&"):
        return subprocess.run(command, shell=True, executable=shell, check=False).returncode
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with subprocess.Popen(
        command, shell=True, executable=shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 4096):
            sys.stdout.write(decoder.decode(piece))
            sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True))
    return process.returncode


def _run_with_input(words: list[str], given: bytes) -> int:
    out = None if sys.stdout is sys.__stdout__ else subprocess.PIPE
    err = None if sys.stderr is sys.__stderr__ else subprocess.PIPE
    done = _done(words, given, out, err)
    sys.stdout.write(_text(done.stdout))
    sys.stderr.write(_text(done.stderr))
    return done.returncode


def _done(words: list[str], given: bytes, out: int | None, err: int | None) -> subprocess.CompletedProcess[bytes]:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return subprocess.run(words, input=given, stdout=out, stderr=err, check=False)
    except FileNotFoundError:
        # IPython's text, and no error for it either
        print(f"Couldn't find program: {words[0]!r}")
        return subprocess.CompletedProcess(words, 0)


def _start(words: list[str], given: bytes) -> int:
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(given)
    return 0


def _bytes(text: str) -> bytes:
    return (text if text.endswith("\n") else text + "\n").encode("utf-8", "replace")


def _text(written: bytes | None) -> str:
    return (written or b"").decode("utf-8", "replace")
