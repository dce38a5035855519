"""What can't be run is refused with an error that says what to do, and the notebook goes on."""

import re

import pytest

from tests.kernel.kernels import Cell, Kernel


def refused(cell: Cell, error_name: str) -> str:
    """The text of the error with which a cell was refused, which shows no frame but the person's own."""
    assert cell.failure.name == error_name
    assert "accelerate_nb/" not in cell.failure.traceback
    return cell.failure.text


WITH_FILE = """
import pathlib
file = pathlib.Path("wrong.yaml")
file.write_text("{key}: {value}")
notebook_launcher(print, config_file=file)
"""
WITH_VARIABLE = """
import os
os.environ["ACCELERATE_NB_{key}"] = "{value}"
try:
    notebook_launcher(print)
finally:
    del os.environ["ACCELERATE_NB_{key}"]
"""
MISSPELLED = {
    "call": "notebook_launcher(print, num_proceses=2)",
    "launch": "launch(print, num_proceses=2)",
    "line": "%accelerate restart --num-proceses 2",
    "cell": "%%accelerate --num-proceses 2\n1",
    "file": WITH_FILE.format(key="num_proceses", value=2),
    "variable": WITH_VARIABLE.format(key="NUM_PROCESES", value=2),
}


@pytest.fixture
def magics(kernel: Kernel) -> Kernel:
    kernel.ok("%load_ext accelerate_nb")
    return kernel


@pytest.mark.parametrize("call", MISSPELLED.values(), ids=MISSPELLED)
def test_a_misspelled_setting_is_reported_in_one_line(magics: Kernel, call: str) -> None:
    cell = magics.run(call)
    text = refused(cell, "UnknownSettingError")
    assert re.search("(?i)did you mean (--|ACCELERATE_NB_)?num[-_]processes", text)
    assert len(cell.failure.traceback.strip().splitlines()) == 1, cell.failure.traceback


def test_wrong_arguments_of_the_function_are_reported_as_python_reports_them(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(lambda value: value, num_processes=2)")
    assert cell.failure.name == "TypeError"
    assert "missing 1 required positional argument: 'value'" in cell.failure.text


@pytest.mark.parametrize(
    "call", ["input('how many? ')", "breakpoint()", "import pdb; pdb.set_trace()\n        print()"]
)
def test_asking_the_keyboard_in_a_worker_is_an_error_and_no_hang(kernel: Kernel, call: str) -> None:
    cell = kernel.run(f"""
    def asks():
        {call}
    notebook_launcher(asks, num_processes=2)
    """)
    assert cell.failure.name == "StateError"
    assert "has no keyboard" in cell.failure.text
    assert call != "breakpoint()" or "num_processes=1, engine='inline'" in cell.failure.text
    assert re.search(rf"Cell In\[{cell.number}\], line [23], in asks", cell.failure.text)
    assert "pdb" not in call or "(Pdb)" in cell.failure.text
