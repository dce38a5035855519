"""Whatever happens to ranks, a run does and says what the table in the architecture's page has for it."""

from __future__ import annotations

import html
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, get_args

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.event_types import Event, Failure, HeldAt, State, StateChange
from accelerate_nb.events.run_reader import kept_run
from accelerate_nb.failures.hang_report import StackSnapshot
from accelerate_nb.launching.conductor import Conductor, FailedAttempt, Launch, Nodes, decide, with_attempts
from accelerate_nb.launching.group_runner import GroupRunner, RunContext
from accelerate_nb.launching.node_agent.agent import AgentLoop, Report
from accelerate_nb.launching.planning.placement import LaunchPlan, Placement
from accelerate_nb.launching.run import Run
from accelerate_nb.launching.worker_group import EndCause, Stop
from accelerate_nb.notebook.display.text import TextFrontEnd
from accelerate_nb.rank.step_hold import STOP
from accelerate_nb.reports.report import run_report
from accelerate_nb.reports.summary import RunFacts
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport import messages
from accelerate_nb.transport.payload import FunctionCall, pack
from accelerate_nb.transport.worker_spec import current_environment, on_interface
from tests.failures.test_hang_report import waits
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
KILL = int(signal.SIGKILL)
CAUSES = [name for part in get_args(EndCause) for name in (get_args(part) or [part])]


Script: TypeAlias = "Callable[[ScriptedNode], None]"


class ScriptedNode:
    """The agent of a node without processes: its ranks do what a script says, and follow what they are sent."""

    takes_sockets = has_outcomes = False

    def __init__(self, script: Script, _loop: AgentLoop, report: Report) -> None:
        self.ranks: tuple[int, ...] = ()
        self.reports: list[messages.Message] = []
        self._send, self._script = report, script
        self._numbers = dict.fromkeys(range(2), 0)
        self._ended: set[int] = set()

    def event(self, rank: int, event: Event) -> None:
        self.reports.append(messages.RankEvent(rank, self._number(rank), event))

    def state(self, state: State, rank: int, detail: str = "") -> None:
        self.event(rank, StateChange(rank, state, time.time(), detail))

    def fails(self, rank: int, *, by_us: bool = False) -> None:
        kind, text = ("KeyboardInterrupt", "") if by_us else ("KeyError", "'a'")
        self.event(rank, Failure(rank, kind, text, "", time.time(), ended_by_us=by_us))
        self.state("stopped" if by_us else "failed", rank)
        self.exits(rank, 1)

    def exits(self, rank: int, code: int, *, killed: bool = False) -> None:
        if rank in self.ranks and rank not in self._ended:
            self._ended.add(rank)
            self.reports.append(messages.RankExited(rank, self._number(rank), code, time.time(), killed=killed))

    def _number(self, rank: int) -> int:
        self._numbers[rank] += 1
        return self._numbers[rank] - 1

    # ------------------------------------------------------------------------------------------------- as an agent

    def start(self, request: messages.StartWorkers, descriptors: Sequence[int]) -> None:
        self.ranks = request.ranks
        for rank in self.ranks:
            self.state("running", rank)
        self._script(self)

    def tick(self, now: float, timeout: float) -> float:
        self.drain()
        return min(timeout, 0.01)

    def carry_out(self, message: messages.Message, descriptors: Sequence[int] = ()) -> None:
        match message:
            case messages.ToRank(rank, messages.HoldAtStep()) if rank not in DEAF:
                self.event(rank, HeldAt(rank, STOP, 7, 0.01))
            case messages.ToRank(rank, messages.StopAt()):
                self.state("stopping", rank, "after step 8")
                self.fails(rank, by_us=True)
            case messages.SignalRanks(number, ranks) if number == signal.SIGINT:
                for rank in set(ranks) - self._ended - DEAF:
                    self.fails(rank, by_us=True)
            case messages.KillGroup():
                for rank in self.ranks:
                    self.exits(rank, -KILL, killed=True)
            case messages.ReleaseRanks(ranks):
                for rank in set(ranks) - DEAF:
                    self.exits(rank, 0)

    def snapshot(self, ranks: Sequence[int]) -> StackSnapshot:
        waiting = [rank for rank in ranks if rank not in self._ended]
        entry = {"group": "0", "number": 2, "name": "gloo:all_reduce", "sizes": [[3]], "awaited": [1]}
        return StackSnapshot(dict.fromkeys(waiting, waits()), {rank: [entry] for rank in waiting})

    def drain(self) -> None:
        waiting, self.reports = self.reports, []
        for report in waiting:
            self._send(report, ())

    def close(self) -> None:
        pass


# the ranks that come to no step, follow no interrupt, and end late
DEAF: set[int] = set()


def runs_on(node: ScriptedNode) -> None:
    pass


def returns(node: ScriptedNode) -> None:
    for rank in node.ranks:
        node.state("finished", rank)


def raises(node: ScriptedNode) -> None:
    node.fails(1)


def loses_its_ranks(node: ScriptedNode) -> None:
    if 1 in node.ranks:
        node.reports.append(messages.AgentLost(node.ranks, "its connection has ended", time.time()))


def raises_once() -> Script:
    scripts = [returns, raises]
    return lambda node: scripts.pop()(node)


@dataclass
class Scenario:
    """What is done to a run of two ranks, and the settings of it."""

    script: Script
    stops: Sequence[Stop] = ()
    nodes: tuple[int, ...] = (2,)
    deaf: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


# what a person ended, or the limit of time, is not started again all the same
RESTARTS = {"max_restarts": 2}
SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "returned": lambda: Scenario(returns),
    "failed": lambda: Scenario(raises),
    "died": lambda: Scenario(lambda node: node.exits(1, -KILL)),
    "node_lost": lambda: Scenario(loses_its_ranks, nodes=(1, 1)),
    "workers_lost": lambda: Scenario(loses_its_ranks),
    "timed_out": lambda: Scenario(runs_on, settings={"timeout": 0.5, **RESTARTS}),
    "deadlocked": lambda: Scenario(lambda node: node.state("finished", 1), settings={"hang_warning_after": 0.2}),
    "finish": lambda: Scenario(runs_on, ["finish"], settings=RESTARTS),
    "interrupt": lambda: Scenario(runs_on, ["interrupt"], settings=RESTARTS),
    "kill": lambda: Scenario(runs_on, ["finish", "kill"], deaf=True, settings=RESTARTS),
    # decisions of the conductor
    "restart": lambda: Scenario(raises_once(), settings=RESTARTS),
    "give up": lambda: Scenario(raises, settings={"max_restarts": 1}),
}


def rows() -> dict[str, list[str]]:
    """The rows of the page's table by their first cell, without the marks of code."""
    part = PAGE.read_text(encoding="utf-8").partition("<!-- ends: begin -->")[2].partition("<!-- ends: end -->")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.strip().splitlines()[2:]]
    return {row[0].strip("`"): [cell.replace("`", "") for cell in row[1:]] for row in cells}


def conducted(scenario: Scenario, folder: Path) -> tuple[Conductor, list[GroupRunner]]:
    """The conductor of a scenario's run, and the groups that it makes."""
    config = resolve(
        {"num_processes": 2, "cpu": True, "stop_grace_period": 0.3, "restart_delay": 0.0, **scenario.settings}, {}
    )
    placement = Placement("supervisor", 2, True, "2 ranks by a script")
    folder.mkdir()
    plan = LaunchPlan(
        pack(FunctionCall(print, ())), 2, current_environment(on_interface(), 1), run="a", node_sizes=scenario.nodes
    )
    groups: list[GroupRunner] = []

    def worker_group(run_context: RunContext, number: int) -> GroupRunner:
        agents = [partial(ScriptedNode, scenario.script) for _ in scenario.nodes]
        groups.append(GroupRunner(plan, agents, run_context, number))
        return groups[-1]

    launch = Launch("train", config, placement, CellSources({}, {}), folder, {})
    return Conductor(launch, worker_group, Nodes(), plan.payload), groups


def test_the_table_has_every_way_in_which_a_run_ends() -> None:
    assert list(rows()) == list(SCENARIOS) == [*CAUSES, "restart", "give up"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_ends_and_is_shown_as_the_table_has_it(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = SCENARIOS[name]()
    monkeypatch.setattr(f"{__name__}.DEAF", {0, 1} if scenario.deaf else set())
    conductor, groups = conducted(scenario, tmp_path / "run")
    # a stop that comes while it tidies up changes nothing
    monkeypatch.setattr(Nodes, "leave", lambda _self, _reason: conductor.request_stop("finish"))
    run = Run(conductor, TextFrontEnd(is_command=True))
    run.start()
    for how in scenario.stops:
        until(lambda: groups and groups[-1].group.begun)
        conductor.request_stop(how)
    error: BaseException | None = None
    try:
        run.wait()
    except BaseException as raised:
        error = raised
    _, _, state, raised_name, text, report = rows()[name]
    if name in CAUSES:
        assert (groups[-1].group.cause, run.view.restarts) == (name, ())
    assert f"{run.view.state}: {run.view.detail}".removesuffix(": ") == state
    assert ("nothing" if error is None else type(error).__name__) == raised_name
    assert text in capfd.readouterr().err
    shown = run_report(RunFacts.of(run, host="", background=False, can_act=False), run.view)["text/html"]
    assert report in html.unescape(re.sub("<[^>]*>", "", shown))
    saved = kept_run(run.folder)
    assert saved is not None
    assert saved.state == run.view.state


# ------------------------------------------------------------------------------------------------------- restarts

KILLED = FailedAttempt("rank 1 ended with SIGKILL", has_stepped=True)
EARLY = FailedAttempt("rank 1 ended with SIGKILL")
TOO_EARLY = (None, "5 attempts in a row ended before their first optimizer step")
NOT_HEALED = "a restart does not heal a"


@pytest.mark.parametrize(
    ("attempts", "max_restarts", "decision"),
    [
        ([KILLED] * 3, 3, (2.0, "")),
        ([KILLED] * 4, 3, (None, "max_restarts=3 is used up")),
        # the pause doubles, up to a minute
        ([KILLED] * 20, 10_000, (60.0, "")),
        ([KILLED] * 5000, 10_000, (60.0, "")),
        ([EARLY] * 4, 9, (4.0, "")),
        ([EARLY, KILLED, *[EARLY] * 4], 9, (16.0, "")),
        ([KILLED, *[EARLY] * 5], 9, TOO_EARLY),
        # an evaluation of minutes has got somewhere without a step
        ([FailedAttempt("lost", seconds=301)] * 5, 9, (8.0, "")),
        *(
            ([FailedAttempt("", names)], 1, (0.5, ""))
            for names in (("ConnectionResetError", "OSError"), ("OutOfMemoryError",), ("SIGKILL",), ())
        ),
        # what a person ended, or was not to be restarted, needs no explanation
        ([FailedAttempt("", was_stopped=True)], 3, (None, "")),
        ([FailedAttempt("", timed_out=True)], 3, (None, "")),
        ([KILLED], 0, (None, "")),
        *(
            ([FailedAttempt("", names, has_stepped=True)], 3, (None, f"{NOT_HEALED} {names[0]}: {why}"))
            for names, why in [
                (("SyntaxError", "Exception"), "the code can't be read"),
                (("ModuleNotFoundError", "ImportError", "Exception"), "a module is missing"),
                (("FileNotFoundError", "OSError"), "a file is missing"),
                (("NeedsForkError", "PayloadError", "LaunchError"), "something can't travel to another process"),
                (("StopRequested", "KeyboardInterrupt"), "it was interrupted"),
            ]
        ),
    ],
)
def test_ranks_start_again_after_a_failure_that_may_heal(
    attempts: list[FailedAttempt], max_restarts: int, decision: tuple[float | None, str]
) -> None:
    assert decide(attempts, max_restarts, 0.5) == decision
    # without a pause there is none that doubles
    assert decide(attempts, max_restarts, 0.0) == (decision[0] and 0.0, decision[1])


def test_the_error_of_a_run_that_is_given_up_lists_all_attempts() -> None:
    attempts = [FailedAttempt("rank 0 failed", seconds=1.25), FailedAttempt("rank 1 failed", seconds=60)]
    lost = LaunchError("Lost.")
    assert with_attempts(lost, attempts, "") is lost
    assert str(with_attempts(lost, attempts, "max_restarts=1 is used up")).splitlines() == [
        "Lost.",
        "",
        "It was not started again: max_restarts=1 is used up.",
        "attempt 0 (1.2 s): rank 0 failed",
        "attempt 1 (60.0 s): rank 1 failed",
    ]
    assert str(with_attempts(lost, attempts[:1], "so")).endswith("\nIt was not started again: so.")
