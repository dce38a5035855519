"""Faults that befall detached runs, each as a function that makes one happen and checks what is left: run as a program, many times."""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from accelerate_nb import LaunchError, StoppedError, WorkerError, attach, launch, runs
from accelerate_nb.events.run_reader import kept_run
from accelerate_nb.launching.detached.control import ControlClient, connect
from accelerate_nb.transport.messages import QueryLiveState
from tests.launching.detached.trainings import (
    SETTINGS,
    host_of,
    launched_elsewhere,
    processes_of,
    running,
    status,
    steps_of,
    supervisor_of,
    trains,
    until_gone,
    writes_lines,
)
from tests.waiting import until

LONG = 100_000
# What stands around the table of a page.
MARKS = ("<!-- faults: begin -->", "<!-- faults: end -->")


def dies(phase: str, at_step: int, folder: str) -> int:
    """A training in which rank 1 is killed within a phase of a step."""
    import torch

    from accelerate_nb import Accelerator
    from accelerate_nb.utils import ProjectConfiguration

    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    )

    def kill(*where: object) -> None:
        if where == (phase, at_step) and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    class Net(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            kill("forward", step)
            return super().forward(inputs)

    model = Net(2, 1)
    model.weight.register_hook(lambda _: kill("backward", step))
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(at_step + 50):
        print("step", step)
        loss = prepared(torch.ones(4, 2)).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if phase == "collective" and step == at_step:
            # the other rank waits for it
            if accelerator.process_index == 1:
                time.sleep(0.2)
            kill("collective", step)
        accelerator.reduce(loss.detach())
        if phase == "saving" and step == at_step and accelerator.process_index == 1:
            threading.Timer(random.random() * 0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if phase == "saving":
            accelerator.save_state()
    return 0


def is_killed_beside_deaf_ones(victim: int, seconds: float) -> None:
    """The victim is killed after a while, and no interrupt ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if int(os.environ["RANK"]) == victim:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def saves_each_step(kill_at: int, folder: str) -> list[float]:
    """The weights after 8 steps with a checkpoint after each; rank 1 is killed in one of them, once."""
    import torch

    from accelerate_nb import Accelerator
    from accelerate_nb.utils import DistributedDataParallelKwargs, ProjectConfiguration

    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2),
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=0.01)],  # type: ignore[arg-type] # as DDP takes it
    )
    torch.manual_seed(0)
    built = torch.nn.Sequential(*[layer for _ in range(6) for layer in (torch.nn.Linear(40, 40), torch.nn.Tanh())])
    model, optimizer = accelerator.prepare(built, torch.optim.SGD(built.parameters(), 0.05, momentum=0.9))
    accelerator.resume()
    for step in range(accelerator.save_iteration, 8):
        if step == kill_at and accelerator.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(7, 40, generator=generator)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
    return [value for weight in built.parameters() for value in weight.flatten().tolist()]


# ------------------------------------------------------------------------------------------------------------------ faults


def the_kernel_is_killed(folder: Path, chance: random.Random) -> None:
    """The run goes on to its end, with all lines and results; no process is left."""
    _goes_on_to_its_end(signal.SIGKILL, folder, chance)


def the_kernel_is_suspended(folder: Path, chance: random.Random) -> None:
    """The run goes on to its end, as if nobody had watched it."""
    _goes_on_to_its_end(signal.SIGSTOP, folder, chance)


def the_run_host_is_killed(folder: Path, chance: random.Random) -> None:
    """All ranks end with it, and the run is shown as lost."""
    run, processes = _running(folder, chance)
    host_of(run.folder).kill()
    until_gone(processes)
    _raises(lambda: run.wait(60), LaunchError, "was lost")
    kept = kept_run(run.folder)
    assert kept is not None
    assert (kept.is_lost, kept.last_state) == (True, "running")


def the_supervisor_is_killed(folder: Path, chance: random.Random) -> None:
    """The run fails with the reason, and no process is left."""
    run, processes = _running(folder, chance)
    supervisor_of(run.folder).kill()
    _raises(lambda: run.wait(60), LaunchError, "workers were lost")
    _is_over(run.folder, processes, "failed")


def _worker_dies(phase: str, folder: Path, chance: random.Random) -> None:
    at_step = chance.randrange(1, 20)
    run = launch(dies, (phase, at_step, str(folder / "project")), folder=str(folder), **SETTINGS)
    processes = processes_of(run.folder)
    _raises(lambda: run.wait(60), WorkerError, "rank 1 ended with SIGKILL")
    _is_over(run.folder, processes, "failed")
    lines = run.logs(1).splitlines()
    assert lines == [f"step {step}" for step in range(len(lines))]
    assert phase == "saving" or len(lines) == at_step + 1, f"of {at_step + 1} lines there are {len(lines)}"


def a_worker_is_killed_in_forward(folder: Path, chance: random.Random) -> None:
    """The rank is named with SIGKILL, the others end, and no line is lost."""
    _worker_dies("forward", folder, chance)


def a_worker_is_killed_in_backward(folder: Path, chance: random.Random) -> None:
    """The rank is named with SIGKILL, the others end, and no line is lost."""
    _worker_dies("backward", folder, chance)


def a_worker_is_killed_in_a_collective(folder: Path, chance: random.Random) -> None:
    """The rank is named with SIGKILL, although the others noticed it first."""
    _worker_dies("collective", folder, chance)


def a_worker_is_killed_while_saving(folder: Path, chance: random.Random) -> None:
    """The rank is named, and every checkpoint that stands under its name is whole."""
    _worker_dies("saving", folder, chance)
    checkpoints = folder / "project" / "checkpoints"
    from accelerate_nb import Accelerator

    for checkpoint in sorted(checkpoints.glob("checkpoint_*")):
        # what stands under its name is whole
        Accelerator(cpu=True).load_state(str(checkpoint))


def two_clients_stop_at_once(folder: Path, chance: random.Random) -> None:
    """The ranks stop after one step that they share, and both clients get the results."""
    run, processes = _running(folder, chance)
    other = attach(run.folder, panel=False)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda client: client.stop(), (run, other)))
    assert run.wait(20)[1] == other.wait(20)[1] < LONG
    _is_over(run.folder, processes, "stopped")


def a_client_attaches_in_a_flood(folder: Path, chance: random.Random) -> None:
    """It sees 100,000 lines, each once and in order."""
    run = launch(writes_lines, (50_000,), folder=str(folder), **SETTINGS)
    processes = processes_of(run.folder)
    _sleep(chance, 3.0)
    other = attach(run.folder, panel=False)
    assert other.wait(60) == 50_000
    assert other.view.line_count == 100_000, f"{other.view.line_count} lines of 100,000"
    for rank in (0, 1):
        written = [f"line {number} of a flood" for number in range(50_000)]
        assert other.logs(rank).splitlines() == written, "a line is lost"
        seen = [line.text for line in other.view.rank(rank).lines]
        assert seen == written[-len(seen) :], "lines are in another order than in the file"
    _is_over(run.folder, processes, "finished")


def the_disk_is_full(folder: Path, chance: random.Random) -> None:
    """The training goes on, and its outcome is written as soon as there is room."""
    with _small_disk(folder, "1m") as small:
        run = launch(trains, (20, 0.05, str(folder)), folder=str(small), **SETTINGS)
        processes = processes_of(run.folder)
        _fill(small)
        until(lambda: min(steps_of(folder)) == 19)
        client = ControlClient(Path(status(run.folder)["control"]))
        until(lambda: getattr(client.request(QueryLiveState()), "done", False))
        client.close()
        assert not run.done
        # somebody makes room, and the outcome is written still
        (small / "ballast").unlink()
        assert run.wait(60) == (0, 20)
        _is_over(run.folder, processes, "finished", timeout=20.0)


def a_client_reads_nothing(folder: Path, chance: random.Random) -> None:
    """The run keeps its pace, and other clients are served."""
    run, processes = _running(folder, chance)
    with connect(Path(status(run.folder)["control"]), 5.0) as silent:
        silent.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                silent.send(b"\0" * 65536)
        before = steps_of(folder)[0]
        began = time.monotonic()
        until(lambda: steps_of(folder)[0] > before + 20)
        assert time.monotonic() - began < 15, "the run slows down"
        assert run.stacks(), "no stacks came"
    run.request_stop("kill")
    _raises(lambda: run.wait(60), StoppedError, "")
    _is_over(run.folder, processes, "stopped")


def the_folder_is_removed(folder: Path, chance: random.Random) -> None:
    """The ranks stop after a step that they share, the reason is raised, and no process is left."""
    run, processes = _running(folder, chance)
    with Path(f"/proc/{host_of(run.folder).pid}/fd/2").open("rb") as log:
        shutil.rmtree(run.folder)
        _raises(lambda: run.wait(60), LaunchError, "its folder was removed while it ran")
        until_gone(processes)
        assert b"is stopped: its folder" in log.read(), "the run host does not write why"
    assert not run.folder.exists(), "the folder has come again"
    assert len(set(steps_of(folder))) == 1, "the ranks stopped after different steps"


def the_disk_is_full_at_the_start(folder: Path, chance: random.Random) -> None:
    """The launch raises the reason, and what was begun is ended."""
    before = {process.pid for process in psutil.process_iter()}
    with _small_disk(folder, "64k") as small:
        _fill(small)
        launches = partial(launch, trains, (LONG, 0.02, str(folder)), folder=str(small / "runs"), **SETTINGS)
        _raises(launches, LaunchError, "is its disk full")
        begun = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
        hosts = [process for process in begun if any("run_host" in word for word in process.info["cmdline"] or ())]
        until_gone(hosts)
        assert list((small / "runs").iterdir()) == [], "a folder is left"
        assert steps_of(folder) == [-1, -1], "the training began"


def a_worker_is_killed_beside_deaf_ones(folder: Path, chance: random.Random) -> None:
    """On two nodes: the rank is named with SIGKILL, although all others had to be killed too."""
    settings = {**SETTINGS, "detach": False, "panel": "off", "num_processes": 4, "num_nodes": 2, "engine": "local"}
    victim = chance.randrange(4)
    run = launch(is_killed_beside_deaf_ones, (victim, chance.random()), folder=str(folder), **settings)
    _raises(lambda: run.wait(60), WorkerError, f"rank {victim} ended with SIGKILL: it was killed from outside")


def three_ranks_start_again(folder: Path, chance: random.Random) -> None:
    """After a rank was killed at any step, the weights of three DDP ranks are those of a training that never failed, bit for bit."""
    settings = {**SETTINGS, "detach": False, "panel": "off", "num_processes": 3, "max_restarts": 1, "results": "all"}
    at_step = chance.randrange(1, 8)
    found = [
        launch(saves_each_step, (kill_at, str(folder / str(kill_at))), folder=str(folder), **settings).wait(120)
        for kill_at in (-1, at_step)
    ]
    assert found[0] == found[1], f"killed in step {at_step}, the weights are others"


FAULTS: tuple[Callable[[Path, random.Random], None], ...] = (
    the_kernel_is_killed,
    the_kernel_is_suspended,
    the_run_host_is_killed,
    the_supervisor_is_killed,
    a_worker_is_killed_in_forward,
    a_worker_is_killed_in_backward,
    a_worker_is_killed_in_a_collective,
    a_worker_is_killed_while_saving,
    two_clients_stop_at_once,
    a_client_attaches_in_a_flood,
    the_disk_is_full,
    a_client_reads_nothing,
    the_folder_is_removed,
    the_disk_is_full_at_the_start,
    a_worker_is_killed_beside_deaf_ones,
    three_ranks_start_again,
)


# ------------------------------------------------------------------------------------------------------------- what is left


@contextlib.contextmanager
def _small_disk(folder: Path, size: str) -> Iterator[Path]:
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)], check=True)
    try:
        yield small
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def _fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))


def _running(folder: Path, chance: random.Random) -> tuple[Any, list[psutil.Process]]:
    run = running(folder, LONG)
    _sleep(chance, 1.0)
    return run, processes_of(run.folder)


def _goes_on_to_its_end(number: signal.Signals, folder: Path, chance: random.Random) -> None:
    """The run of a launcher that gets a signal."""
    launcher, of_run = launched_elsewhere(20, 0.05, folder)
    _sleep(chance, 2.0)
    os.killpg(launcher.pid, number)
    try:
        processes = processes_of(of_run)
        run = attach(of_run, panel=False)
        assert run.wait(60) == [(0, 20), (1, 20)]
        for rank in (0, 1):
            written = [f"step {step}" for step in range(20)]
            assert run.logs(rank).splitlines() == written == [line.text for line in run.view.rank(rank).lines]
        _is_over(of_run, processes, "finished")
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def _is_over(of_run: Path, processes: list[psutil.Process], state: str, timeout: float = 10.0) -> None:
    until_gone(processes, timeout)
    kept = kept_run(of_run)
    assert kept is not None
    assert kept.state == state, f"the state is {kept.state}"
    assert not list(of_run.glob("*.sock")), "a socket is left"


def _raises(call: Callable[[], object], kind: type[BaseException], text: str) -> None:
    caught: BaseException | None = None
    try:
        call()
    except kind as error:
        caught = error
    assert caught is not None, f"no {kind.__name__} was raised"
    assert text in str(caught), f"the error is {caught}"


def _sleep(chance: random.Random, most: float) -> None:
    time.sleep(chance.random() * most)


def main() -> int:
    """Make every fault happen some times at random moments, and print a table, or write it between the marks of a page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="how often each fault happens")
    parser.add_argument("--only", nargs="+", choices=[fault.__name__ for fault in FAULTS], help="these faults only")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--page", type=Path, help="the page that gets the table")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    failed = 0
    table = [
        "| What was done | Rounds | As it should be | What should happen, and did not where the numbers differ |",
        "|---|---|---|---|",
    ]
    for fault in FAULTS:
        if arguments.only and fault.__name__ not in arguments.only:
            continue
        complaints, began = [], time.monotonic()
        for number in range(arguments.rounds):
            with tempfile.TemporaryDirectory(prefix="accelerate_nb_fault_", ignore_cleanup_errors=True) as folder:
                try:
                    fault(Path(folder), chance)
                except Exception as error:  # whatever is wrong stands in the table
                    complaints.append(f"round {number}: {type(error).__name__}: {error}".partition("\n")[0])
                    print(f"{fault.__name__}: {complaints[-1]}", file=sys.stderr, flush=True)
                for kept in runs(folder):
                    if not kept.is_over:
                        host_of(kept.folder).kill()
        what = fault.__name__.replace("_", " ").capitalize()
        promise, right = " ".join((fault.__doc__ or "").split()), arguments.rounds - len(complaints)
        table.append(f"| {what} | {arguments.rounds} | {right} | {' '.join([promise, *complaints[:1]])} |")
        failed += len(complaints)
        print(table[-1], f"{(time.monotonic() - began) / arguments.rounds:.1f} s each", flush=True)
    if arguments.page is not None:
        before, _, rest = arguments.page.read_text(encoding="utf-8").partition(MARKS[0])
        head = f"Made on {time.strftime('%Y-%m-%d')} with torch {version('torch')} on {os.cpu_count()} cores, by `make chaos ROUNDS={arguments.rounds}`."
        page = "\n".join([before + MARKS[0], head, "", *table, MARKS[1] + rest.partition(MARKS[1])[2]])
        arguments.page.write_text(page, encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
