"""docs/security.md names what the system shows of a run: sockets, files with their modes, and variables."""

import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelerate_nb import notebook_launcher

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc of Linux")]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
ENGINES = {
    "supervisor": {},
    "fork": {"start_method": "fork"},
    "spawn": {"start_method": "spawn"},
    "inline": {"engine": "inline", "num_processes": 1},
    "detached": {"detach": True},
}


def section(title: str) -> str:
    """The text of one section of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(title: str) -> list[list[str]]:
    """The names in backquotes of the first cell of each row in a section's table."""
    rows = [line for line in section(title).splitlines() if line.startswith("| ") and "---" not in line][1:]
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in rows]


def looks_around(launcher: int, names_before: list[str], ports_before: set[int]) -> dict[str, Any]:
    """What rank 0 finds while all ranks are in a group, have printed, logged and saved."""
    import torch

    from accelerate_nb import Accelerator

    os.umask(0o022)
    print("a line")
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("it")
    accelerator.prepare(torch.nn.Linear(2, 1))
    folder = Path(os.environ["ACCELERATE_NB_RUN_FOLDER"])
    accelerator.save_state(folder.parent / "checkpoint")
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.wait_for_everyone()
    processes = {psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)}
    for parent in psutil.Process().parents():
        # those of a run host are no children of the launcher
        if any("accelerate_nb" in word for word in parent.cmdline()):
            processes |= {parent, *parent.children(recursive=True)}
    unix = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if str(folder) in line}
    found = {
        "listening": sorted(
            {ip for process in processes for ip, port in listening(process) if port not in ports_before}
        ),
        "unix": sorted(Path(path).name for path in unix),
        "files": {path.name: f"{path.lstat().st_mode & 0o777:o}" for path in (folder, *folder.iterdir())},
        "variables": sorted(set(os.environ) - set(names_before)),
        "environ": f"{os.stat('/proc/self/environ').st_mode & 0o777:o}",
        "open": sorted(name for name in map(opened, Path("/proc/self/fd").iterdir()) if name.startswith(str(folder))),
        "folder": folder.name,
    }
    accelerator.wait_for_everyone()
    return found


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """The addresses at which a process waits for connections."""
    try:
        return [tuple(item.laddr) for item in process.net_connections("inet") if item.status == "LISTEN"]
    except psutil.Error:
        return []


def opened(descriptor: Path) -> str:
    """What a descriptor of this process refers to."""
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 finds on each engine."""
    before, umask = [name for name in os.environ if not name.startswith("TORCHINDUCTOR")], os.umask(0o022)
    settings = {"num_processes": 2, "cpu": True, "config_file": "", "panel": "off"}
    settings["folder"] = str(tmp_path_factory.mktemp("runs"))
    # what other tests have left open in this process is not of these runs
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    arguments = (os.getpid(), before, {port for process in family for _, port in listening(process)})
    try:
        return {
            name: notebook_launcher(looks_around, arguments, **{**settings, **engine})
            for name, engine in ENGINES.items()
        }
    finally:
        os.umask(umask)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_listens_but_on_loopback_and_in_the_folder_of_a_detached_run(
    found: dict[str, Any], engine: str
) -> None:
    sockets = [name for names in first_cells("Sockets") for name in names]
    assert set(found[engine]["listening"]) <= {name for name in sockets if name == "127.0.0.1"}
    assert bool(found[engine]["listening"]) == (engine != "inline")
    assert found[engine]["unix"] == (["control.sock"] if engine == "detached" else [])
    assert "control.sock" in sockets


def test_the_files_of_runs_have_the_modes_of_the_page(found: dict[str, Any]) -> None:
    rows = [row.split("|")[1:3] for row in section("Files").splitlines() if row.startswith("| `") or "folder |" in row]
    modes = {name: mode.strip() for names, mode in rows for name in re.findall(r"`([^`]+)`", names) or ["folder"]}
    seen = {}
    for item in found.values():
        files = dict(item["files"])
        seen["folder"] = files.pop(item["folder"])
        seen |= {re.sub(r"^rank_\d+", "rank_0", name): mode for name, mode in files.items()}
    assert seen == modes


def test_ranks_have_the_variables_of_the_page_and_the_environment_has_its_mode(found: dict[str, Any]) -> None:
    named = {name for names in first_cells("Variables") for name in names}
    variables = {name for item in found.values() for name in item["variables"]}
    assert variables - {"TORCHINDUCTOR_CACHE_DIR"} <= named
    assert named - {"ACCELERATE_*", "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS", "ACCELERATE_USE_CPU"} <= variables
    assert {item["environ"] for item in found.values()} == {"400"}


def test_ranks_have_no_file_of_the_run_open(found: dict[str, Any]) -> None:
    assert [item["open"] for name, item in found.items() if name not in {"inline", "fork"}] == [[]] * 3
