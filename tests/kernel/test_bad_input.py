"""What can't be run is refused with an error that says what to do, and the notebook goes on."""

from __future__ import annotations

import re

import pytest

from tests.kernel.kernels import Cell, Kernel


def refused(cell: Cell, error_name: str) -> str:
    """The text of the error with which a cell was refused, which shows no frame but the person's own."""
    assert cell.error is not None, cell.text
    assert cell.error.name == error_name
    assert "accelerate_nb/" not in cell.error.traceback
    return cell.error.text


@pytest.mark.parametrize("wrong", [0, -1, "'two'", 1.5])
def test_a_number_of_processes_that_cannot_be_is_refused(kernel: Kernel, wrong: object) -> None:
    text = refused(kernel.run(f"notebook_launcher(print, num_processes={wrong})"), "ConfigurationError")
    assert "num_processes" in text
    assert str(wrong).strip("'") in text


def test_an_unknown_precision_is_refused_with_the_known_ones(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(print, num_processes=2, mixed_precision='bf61')")
    text = refused(cell, "ConfigurationError")
    for part in ("mixed_precision", "'bf61'", "bf16", "fp16"):
        assert part in text


def test_an_unknown_start_method_is_refused(kernel: Kernel) -> None:
    text = refused(kernel.run("notebook_launcher(print, num_processes=2, start_method='forc')"), "ConfigurationError")
    assert all(part in text for part in ("'forc'", "fork", "spawn"))


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
ABSENT_GPUS = {
    "call": "notebook_launcher(print, gpu_ids='0,999')",
    "launch": "launch(print, num_processes=2, gpu_ids='0,999')",
    "cell": "%%accelerate --gpu-ids 0,999\n1",
    "file": WITH_FILE.format(key="gpu_ids", value="0,999"),
    "variable": WITH_VARIABLE.format(key="GPU_IDS", value="0,999"),
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
    assert cell.error is not None
    assert len(cell.error.traceback.strip().splitlines()) == 1, cell.error.traceback


@pytest.mark.parametrize("call", ABSENT_GPUS.values(), ids=ABSENT_GPUS)
def test_gpus_that_are_not_there_are_refused(magics: Kernel, call: str) -> None:
    text = refused(magics.run(call), "LaunchError")
    assert "gpu_ids='0,999' was requested, but " in text


def test_something_that_is_no_function_is_refused(kernel: Kernel) -> None:
    text = refused(kernel.run("notebook_launcher(print('called'), num_processes=2)"), "ConfigurationError")
    assert "without parentheses" in text
    text = refused(kernel.run("notebook_launcher(print, args=(3), num_processes=2)"), "ConfigurationError")
    assert "args=(x,)" in text


def test_wrong_arguments_of_the_function_are_reported_as_python_reports_them(kernel: Kernel) -> None:
    cell = kernel.run("""
    def takes_one(value):
        pass
    notebook_launcher(takes_one, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "TypeError"
    assert "missing 1 required positional argument: 'value'" in cell.error.text


def test_a_rank_of_a_node_that_there_is_not_is_refused(kernel: Kernel) -> None:
    text = refused(kernel.run("notebook_launcher(print, num_processes=2, node_rank=1)"), "ConfigurationError")
    assert "num_nodes" in text


def test_a_launcher_inside_a_worker_calls_the_function_in_the_workers_that_are_there(kernel: Kernel) -> None:
    kernel.ok("""
    import os
    def inner():
        return int(os.environ["RANK"]), os.getpid()
    def shares_code_with_a_script():
        from accelerate_nb import launch, notebook_launcher
        called = notebook_launcher(inner, num_processes=2, results="all")
        return called, launch(inner, num_processes=2).results, inner()
    shared = notebook_launcher(shares_code_with_a_script, num_processes=2, results="all")
    """)
    shared = kernel.value("shared")
    everyone = [rank_and_pid for *_, rank_and_pid in shared]
    assert [rank for rank, _ in everyone] == [0, 1]
    assert [item[:2] for item in shared] == [[everyone, everyone]] * 2


@pytest.mark.parametrize("call", ["input('how many? ')", "breakpoint()"])
def test_asking_the_keyboard_in_a_worker_is_an_error_and_no_hang(kernel: Kernel, call: str) -> None:
    cell = kernel.run(f"""
    def asks():
        {call}
    notebook_launcher(asks, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "StateError"
    assert "has no keyboard" in cell.error.text
    assert f"Cell In[{cell.number}], line 2, in asks" in cell.error.text


def test_a_debugger_in_a_worker_is_an_error_and_no_hang(kernel: Kernel) -> None:
    cell = kernel.run("""
    def debugs():
        import pdb
        pdb.set_trace()
        print("went on")
    notebook_launcher(debugs, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "StateError"
    assert "(Pdb)" in cell.error.text
    assert "has no keyboard" in cell.error.text


def test_the_notebook_goes_on_after_each_refusal(kernel: Kernel) -> None:
    kernel.run("notebook_launcher(print, num_processes=0)")
    assert kernel.ok("notebook_launcher(lambda: print('fine'), num_processes=2)").stdout.count("fine") == 2
