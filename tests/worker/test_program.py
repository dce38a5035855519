"""A program in a worker finds what it would find if it had been called by itself."""

import json
import os
import sys
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, WorkerError
from accelerate_nb.launching.launcher import prepare
from accelerate_nb.launching.run import FrontEnd, Run
from accelerate_nb.worker.program import (
    Executable,
    Program,
    PythonModule,
    ScriptFile,
    ScriptFunction,
    StandardInput,
    standard_input,
)
from tests.processes import python

# Tells of everything in which one way to run a program could differ from another.
FACTS = """
import inspect, json, multiprocessing, os, pickle, sys, threading, atexit
from concurrent.futures import ThreadPoolExecutor
import beside

class Thing:
    def __init__(self, number):
        self.number = number

def child(queue):
    queue.put((__name__, Thing(2).number, sys.argv))

def of_a_child():
    if os.path.basename(__file__) == "__main__.py":
        return None  # which multiprocessing does not import in its processes
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    facts = queue.get(timeout=30)
    process.join()
    return facts

def main():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "path": sys.path,
        "beside": beside.__file__,
        "names": sorted(name for name in vars(main) if name.startswith("__") and name != "__annotations__"),
        "file": __file__,
        "name": __name__,
        "spec": getattr(__spec__, "name", None),
        "package": __package__,
        "loader": type(__loader__).__name__,
        "is main": main.Thing is Thing,
        "pickled": pickle.loads(pickle.dumps(Thing(5))).number,
        "source": inspect.getsource(Thing),
        "child": of_a_child(),
        "cwd": os.getcwd(),
    }

if __name__ == "__main__":
    facts = main()
    atexit.register(lambda: print("at exit", flush=True))
    # a program is not over before its threads are
    threading.Thread(target=lambda: (threading.main_thread().join(), print("from a thread"))).start()
    ThreadPoolExecutor(1).submit(print, "from a pool")
    with open(os.environ["FACTS"] + os.environ.get("RANK", "0"), "w") as file:
        json.dump(facts, file)
    if "linked" in sys.argv[0]:
        sys.exit(0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, a package and an archive that tell of themselves, in which one works."""
    for home in ("scripts", "package", "archive"):
        (tmp_path / home).mkdir()
        (tmp_path / home / "beside.py").write_text("")
    (tmp_path / "scripts" / "facts.py").write_text(FACTS)
    (tmp_path / "linked.py").symlink_to(tmp_path / "scripts" / "facts.py")
    (tmp_path / "archive" / "__main__.py").write_text(FACTS)
    in_package = FACTS.replace("import beside", "from package import beside")
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(in_package)
    (tmp_path / "package" / "facts.py").write_text(in_package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FACTS", str(tmp_path / "told_"))
    return tmp_path


def run_of(folder: Path, program: Program, size: int = 1, **settings) -> Run:
    settings = {"num_processes": size, "cpu": True, "folder": str(folder / "runs"), "timeout": 60, **settings}
    return Run(prepare(program, (), resolve(settings, {})), FrontEnd()).start()


def by_workers(folder: Path, program: Program, size: int = 1, **settings) -> tuple[dict, str]:
    """What a program tells where workers run it, and what rank 0 writes."""
    run = run_of(folder, program, size, **settings)
    run.wait()
    facts_file = folder / f"told_{size - 1}"
    return json.loads(facts_file.read_text()) if facts_file.exists() else {}, run.logs(0)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda folder: ScriptFile(str(folder / "scripts" / "facts.py"), "scripts/facts.py"), ["scripts/facts.py"]),
        (lambda folder: ScriptFile(str(folder / "linked.py"), "linked.py"), ["linked.py"]),
        (lambda folder: ScriptFile(str(folder / "archive"), "archive"), ["archive"]),
        (lambda folder: PythonModule("package.facts"), ["-m", "package.facts"]),
        (lambda folder: PythonModule("package"), ["-m", "package"]),
    ],
    ids=["script", "linked script", "folder", "module", "package"],
)
def test_a_program_finds_what_python_would_give_it(folder, what, words):
    arguments = ["--lr", "3", "--", "-x"]
    python(*words, *arguments, limit=60, check=True)
    in_python = json.loads((folder / "told_0").read_text())
    # without the entry of what Python runs
    path = json.loads(python("-c", "import json, sys; print(json.dumps(sys.path[1:]))", limit=60, check=True).stdout)
    in_worker, written = by_workers(folder, Program(what(folder), tuple(arguments), path=tuple(path)))
    assert in_worker == in_python
    # what Python does when a program's last line has run is done, too
    assert sorted(written.splitlines()) == ["at exit", "from a pool", "from a thread"]


def test_compiled_files_and_archives_are_programs(folder):
    import py_compile

    (folder / "small.py").write_text("print('small', __name__)")
    py_compile.compile(str(folder / "small.py"), cfile=str(folder / "small.pyc"))
    with zipfile.ZipFile(folder / "small.zip", "w") as archive:
        archive.write(folder / "small.py", "__main__.py")
    for name in ("small.pyc", "small.zip"):
        assert by_workers(folder, Program(ScriptFile(str(folder / name), name)))[1] == "small __main__\n"


def test_a_program_that_python_finds_no_main_in_is_an_error(folder):
    (folder / "empty").mkdir()
    with pytest.raises(ImportError, match="finds no __main__ module in it"):
        by_workers(folder, Program(ScriptFile(str(folder / "empty"), "empty")))
    with pytest.raises(ImportError, match=r"No module named 'package\.nothing'"):
        by_workers(folder, Program(PythonModule("package.nothing")))


def test_every_process_draws_numbers_of_its_own(folder):
    (folder / "draws.py").write_text(
        "import json, os, random, numpy\n"
        "json.dump([random.random(), numpy.random.rand()], open(os.environ['FACTS'] + os.environ['RANK'], 'w'))"
    )
    by_workers(folder, Program(ScriptFile(str(folder / "draws.py"), "draws.py")), size=2)
    first, second = (json.loads((folder / f"told_{rank}").read_text()) for rank in range(2))
    assert all(item != other for item, other in zip(first, second, strict=True))


@pytest.mark.parametrize("start_method", ["supervisor", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_rank_0_reads_the_standard_input(folder, start_method):
    (folder / "reads.py").write_text(
        "import os, sys\n"
        "rank = int(os.environ['RANK'])\n"
        "words = input('who? ') if rank == 0 else sys.stdin.read()\n"
        "import json; json.dump(words, open(os.environ['FACTS'] + str(rank), 'w'))"
    )
    reading, writing = os.pipe()
    os.write(writing, b"somebody\n")
    os.close(writing)
    stdin = StandardInput(reading)
    program = Program(ScriptFile(str(folder / "reads.py"), "reads.py"), stdin=stdin)
    # a line that has not ended ends with its process
    assert by_workers(folder, program, size=2, start_method=start_method) == ("", "who? \n")
    assert json.loads((folder / "told_0").read_text()) == "somebody"
    stdin.close()


@pytest.mark.parametrize(("has_stdin", "who"), [(True, "only rank 0 reads"), (False, "no rank reads")])
def test_the_error_of_a_prompt_on_a_rank_that_reads_nothing_names_who_reads(folder, has_stdin, who):
    (folder / "asks.py").write_text("import os\nif os.environ['RANK'] == '1': input('who? ')")
    stdin = StandardInput(os.open(os.devnull, os.O_RDONLY)) if has_stdin else None
    with pytest.raises(EOFError, match=f"EOF when reading a line: {who} the standard input of this launch"):
        by_workers(folder, Program(ScriptFile(str(folder / "asks.py"), "asks.py"), stdin=stdin), size=2)
    if stdin is not None:
        stdin.close()


def test_a_closed_standard_input_is_none():
    code = (
        "import os; os.close(0)\n"
        "from accelerate_nb.worker.program import standard_input\n"
        "assert standard_input() is None"
    )
    assert python("-c", code, limit=60).returncode == 0
    found = standard_input()
    if found is not None:
        found.close()


@pytest.mark.parametrize(
    ("ends", "message"), [("exit 5", "SystemExit: 5"), ("kill -SEGV $$", "SIGSEGV"), ("exit 0", "")]
)
def test_an_executable_ends_its_worker_as_it_ended(folder, ends, message):
    program = Program(Executable("/bin/sh"), ("-c", f"echo rank $RANK of $WORLD_SIZE; {ends}"))
    with pytest.raises(WorkerError, match=message) if message else nullcontext():
        assert by_workers(folder, program)[1] == "rank 0 of 1\n"


def test_what_a_program_does_with_its_exceptions_is_done(folder):
    (folder / "hooked.py").write_text(
        "import sys, traceback\n"
        "def hook(kind, error, trace):\n"
        "    print('hooked', kind.__name__, [frame.name for frame in traceback.extract_tb(trace)], flush=True)\n"
        "sys.excepthook = hook\n"
        "def fails():\n"
        "    raise KeyError(3)\n"
        "fails()"
    )
    run = run_of(folder, Program(ScriptFile(str(folder / "hooked.py"), "hooked.py")))
    with pytest.raises(KeyError) as caught:
        run.wait()
    assert run.logs(0) == "hooked KeyError ['<module>', 'fails']\n"
    assert "accelerate_nb" not in caught.value.failures[0].traceback


def test_a_run_is_called_as_its_program():
    config = resolve({"num_processes": 1, "cpu": True}, {})
    assert prepare(Program(ScriptFile("/a/train.py", "a/train.py")), (), config).facts.name == "train.py"
    titled = Program(ScriptFile("/tmp/x/train.py", "train.py"), title="train.ipynb")
    assert prepare(titled, (), config).facts.name == "train.ipynb"


MODULE = "class Thing:\n    rank = None\n\ndef main():\n    print('main was called')\n"


@pytest.fixture
def process_as_before() -> Iterator[None]:
    main, modules, path, words = sys.modules["__main__"], set(sys.modules), sys.path[:], sys.argv[:]
    yield
    sys.modules["__main__"], sys.path[:], sys.argv[:] = main, path, words
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.usefixtures("process_as_before")
def test_a_function_is_called_of_a_script_that_is_imported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "train_for_a_test.py"
    path.write_text(f"print('imported as', __name__)\n{MODULE}if __name__ == '__main__':\n    raise SystemExit(3)\n")
    script = ScriptFile(str(path), "train_for_a_test.py")
    for _ in range(2):
        ScriptFunction(script, "main").run(["--lr", "1"])
    assert capsys.readouterr().out.splitlines() == ["imported as train_for_a_test", *["main was called"] * 2]
    assert sys.argv == ["train_for_a_test.py", "--lr", "1"]
    with pytest.raises(
        ConfigurationError, match=r"The function mian of train_for_a_test\.py .* \(it has Thing, main\)"
    ):
        ScriptFunction(script, "mian").run([])
