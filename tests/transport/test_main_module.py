"""`__main__` in a worker: one module for a process, and where ranks are threads, each rank's own under the same name."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.rank_local import alone
from accelerate_nb.transport.main_module import become_main, is_of_main
from accelerate_nb.worker.program import ScriptFile, ScriptFunction

CODE = "class Thing:\n    rank = None\n\ndef main():\n    print('main was called')\n"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    main, modules, path, words = sys.modules["__main__"], set(sys.modules), sys.path[:], sys.argv[:]
    yield
    sys.modules["__main__"], sys.path[:], sys.argv[:] = main, path, words
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_ranks_that_are_threads_each_find_their_own_classes_under_main():
    found = {}
    together = threading.Barrier(2)

    def be(rank: int) -> None:
        module = ModuleType("__main__")
        exec(CODE, vars(module))
        become_main(module)
        together.wait(30)
        main = sys.modules["__main__"]
        main.Thing.rank = rank
        main.number = rank
        together.wait(30)
        same = type(pickle.loads(pickle.dumps(module.Thing()))) is module.Thing
        found[rank] = (
            main.Thing is module.Thing,
            main.Thing.rank,
            vars(main)["number"],
            same,
            is_of_main(module.Thing),
        )

    ranks = [threading.Thread(target=alone().run, args=(be, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert found == {rank: (True, rank, rank, True, True) for rank in range(2)}


def test_a_rank_that_has_its_process_for_itself_has_an_ordinary_main():
    module = ModuleType("__main__")
    become_main(module)
    assert sys.modules["__main__"] is module


def test_a_function_is_called_of_a_script_that_is_imported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "train_for_a_test.py"
    path.write_text(f"print('imported as', __name__)\n{CODE}if __name__ == '__main__':\n    raise SystemExit(3)\n")
    script = ScriptFile(str(path), "train_for_a_test.py")
    for _ in range(2):
        ScriptFunction(script, "main").run(["--lr", "1"])
    assert capsys.readouterr().out.splitlines() == ["imported as train_for_a_test", *["main was called"] * 2]
    assert sys.argv == ["train_for_a_test.py", "--lr", "1"]
    with pytest.raises(
        ConfigurationError, match=r"The function mian of train_for_a_test\.py .* \(it has Thing, main\)"
    ):
        ScriptFunction(script, "mian").run([])
