"""A run that lost a host goes on, with the numbers of a run that never did."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelerate_nb import launch
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.run_reader import kept_run, view_of
from tests.launching.test_restarts import trains
from tests.nodes.hosts import Hosts
from tests.nodes.trainings import agent_of
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)


def kills_its_agent() -> None:
    """The node of this rank is lost."""
    agent_of(psutil.Process()).kill()
    signal.pause()


def dies_with_its_agent() -> None:
    if os.environ["RANK"] == "1":
        kills_its_agent()
    signal.pause()


def test_a_spare_takes_the_place_of_a_lost_host_and_the_weights_are_those_of_an_undisturbed_run(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    undisturbed = launch(trains, (str(tmp_path / "undisturbed"),), **settings).wait()
    settings = {**settings, "hosts": ["h1:1", "h2:1", "h3:1"], "max_restarts": 1, "restart_delay": 0.01}
    run = launch(trains, (str(tmp_path / "disturbed"), kills_its_agent, 5), **settings)
    resumed, numbers = run.wait()
    assert resumed
    assert numbers == undisturbed[1]
    assert [restart.reason for restart in run.view.restarts] == ["node h2 was lost; rank 1 starts again on h3"]
    # also for who reads the run's folder later
    saved = kept_run(run.folder)
    assert saved is not None
    assert [node.name for node in run.view.nodes] == [node.name for node in view_of(saved).nodes] == ["h1", "h3"]


def test_fewer_hosts_go_on_from_the_newest_checkpoint(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, "hosts": ["h1:1", "h2:1"], "num_nodes": "1:2", "max_restarts": 1, "restart_delay": 0.01}
    run = launch(trains, (str(tmp_path / "fewer"), kills_its_agent, 5), **settings, results="all")
    ((resumed, _),) = run.wait()
    assert resumed
    assert [(item.reason, item.ranks) for item in run.view.restarts] == [
        ("node h2 was lost; 1 of 2 ranks starts again, on h1", 1)
    ]
    assert run.view.ranks == (0,)
    assert run.view.failures == ()
    assert [node.name for node in run.view.nodes] == ["h1"]


def test_without_a_spare_the_run_starts_again_on_the_same_hosts_or_reports_what_to_list(
    hosts: Hosts, settings: dict[str, Any]
) -> None:
    command = f"{hosts.ssh_command} -o ConnectTimeout=2"
    run = launch(dies_with_its_agent, **{**settings, "ssh_command": command}, max_restarts=1, restart_delay=3.0)
    until(lambda: run.view.restarts, run)
    text = r"(?s)Workers on h2 were requested.*no spare host could take its place"
    with hosts.cut("h2"), pytest.raises(LaunchError, match=text):
        run.wait(60)
