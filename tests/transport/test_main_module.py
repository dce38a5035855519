"""The `__main__` of a worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.transport.main_module import become_main
from accelerate_nb.worker.program import ScriptFile, ScriptFunction

CODE = "class Thing:\n    rank = None\n\ndef main():\n    print('main was called')\n"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    main, modules, path, words = sys.modules["__main__"], set(sys.modules), sys.path[:], sys.argv[:]
    yield
    sys.modules["__main__"], sys.path[:], sys.argv[:] = main, path, words
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_worker_has_an_ordinary_main():
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
