"""The environment of every test, the table of tests that `make test` leaves out, and the times that the summary gives."""

import gc
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from accelerate_nb.transport.worker_spec import NetworkAddress, RankInfo

TESTS = Path(__file__).resolve().parent
# As for the processes that tests start, `tests/stubs/`.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# Variables that a launcher sets in its workers, and that would make a test believe to be one of them.
OF_A_LAUNCHER = (*RankInfo(0, 1, 0, 1, NetworkAddress("", 0), "").environ(), "MIXED_PRECISION")


@pytest.fixture(scope="session", autouse=True)
def _an_environment_of_our_own() -> None:
    for name in [*OF_A_LAUNCHER, *(name for name in os.environ if name.startswith("ACCELERATE_"))]:
        os.environ.pop(name, None)
    # torch asks for the name of each address that it connects to, and a question that is lost takes five seconds by default
    os.environ["RES_OPTIONS"] = "timeout:1"
    # kernels and scripts that tests start import this checkout, wherever they run, installed or not
    paths = [str(TESTS.parent), str(TESTS / "stubs")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    # a job that a script starts in the background ignores these, and hands that on to all that it starts
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


@pytest.fixture(scope="module", autouse=True)
def _what_is_loaded_is_no_garbage() -> None:
    """
    What code under test collects as garbage, often several times a test, is looked for in what came since the file began.

    Half a second is what a look through all of torch takes, and Accelerate takes one for every file that it loads.
    """
    gc.collect()
    gc.freeze()


# ------------------------------------------------------------------------------------- what `make test` leaves to test-all

# Folders and files of which `make test` runs the tests alone that have one of these in their names; `make test-all` runs the
# rest. What is marked `slow` is left to it anywhere.
KEPT_OF: dict[str, tuple[str, ...]] = {
    "tests/browser": ("test_the_kernel_is_busy",),
    "tests/contracts/test_engines.py": ("[fork", "[inline", "[nodes", "[supervisor"),
    "tests/contracts/test_faults.py": ("[supervisor",),
    "tests/gpu": (),
    "tests/kernel": ("test_cells.py",),
    "tests/launching/detached/test_faults.py": ("the_run_host_is_killed", "attaches_in_a_flood"),
    "tests/launching/test_warmth.py": (),
    "tests/nodes": (),
    "tests/notebooks": ("test_the_first_run", "test_cells_on_two_ranks", "saved_clean"),
    "tests/hf_suite": (),
    "tests/transformers": (),
    "tests/xla": (),
}


def is_left_to_test_all(name: str) -> bool:
    """Whether the table leaves the test of this name to `make test-all`."""
    for prefix, kept in KEPT_OF.items():
        if name.startswith((f"{prefix}/", f"{prefix}::")):
            return not any(part in name for part in kept)
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_left_to_test_all(item.nodeid):
            item.add_marker("slow")


# ------------------------------------------------------------------------------------------------------------ the summary


def folder_of(name: str) -> str:
    """The folder under which a test's time is added up: `tests/kernel`, `tests/runtime/data`; or its file, in no folder."""
    parts = name.partition("::")[0].split("/")
    depth = 3 if "runtime" in parts else 2
    return "/".join(parts[:depth])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    spent: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[folder_of(report.nodeid)] += report.duration
                tests[folder_of(report.nodeid)].add(report.nodeid)
    if spent:
        terminalreporter.section("seconds by folder")
    for folder in sorted(spent, key=lambda folder: -spent[folder]):
        terminalreporter.write_line(f"{spent[folder]:7.1f} s  {len(tests[folder]):5d} tests  {folder}")
