"""The suite's own rules: what `make test` leaves out, how a flaky test is run again, and what the summary says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import KEPT_OF, is_left_to_test_all
from tests.flaky import FLAKY

ROOT = Path(__file__).resolve().parents[1]


def names_a_test(name: str) -> bool:
    """Whether there is a test of this name: the file, and the function in it."""
    file, _, function = name.partition("::")
    if not (ROOT / file).is_file():
        return False
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return function.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_flaky_test_that_is_listed_exists() -> None:
    assert [name for name in FLAKY if not names_a_test(name)] == []
    assert names_a_test("tests/test_suite.py::test_every_flaky_test_that_is_listed_exists[2]")
    assert not names_a_test("tests/test_suite.py::test_no_such_test")


def test_what_is_left_to_test_all_exists() -> None:
    assert [path for path in KEPT_OF if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("tests/kernel/test_panel.py::test_a_panel", True),
        ("tests/kernel/test_cells.py::test_a_cell", False),
        ("tests/contracts/test_faults.py::test_a_fault[fork]", True),
        ("tests/contracts/test_engines.py::test_an_engine[fork]", False),
        ("tests/style/test_words.py::test_no_link_is_dead", False),
    ],
)
def test_the_table_names_the_tests_that_are_left_out(name: str, left: bool) -> None:
    assert is_left_to_test_all(name) is left


CONFTEST = """
from tests.conftest import pytest_configure, pytest_runtest_protocol, pytest_terminal_summary
from tests.flaky import FLAKY, Flaky
FLAKY["test_it.py::test_listed"] = Flaky("it is so", "1 of 2 runs")
"""
TESTS = """
runs = {"listed": 0, "other": 0}

def passes_at_the_second_run(name):
    runs[name] += 1
    assert runs[name] == 2

def test_listed():
    passes_at_the_second_run("listed")

def test_other():
    passes_at_the_second_run("other")
"""


def test_a_listed_test_alone_is_run_again_and_the_summary_reports_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", "--rootdir", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert "1 failed, 1 passed" in done.stdout
    assert "FAILED test_it.py::test_other" in done.stdout
    assert "failed and was run again, because it is so (1 of 2 runs): test_it.py::test_listed" in done.stdout
    assert "2 tests  test_it.py" in done.stdout
