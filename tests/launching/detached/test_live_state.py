"""What a run's folder does not keep comes to whoever attaches to it."""

from __future__ import annotations

from accelerate_nb.events.model import HostSample, NodeRanks
from accelerate_nb.events.run_state import RunState
from accelerate_nb.launching.detached.control import apply_live, live_events


def test_the_load_of_each_machine_comes_to_another_view_of_the_run() -> None:
    views = RunState(2), RunState(2)
    for view in views:
        # these are in the folder
        view.apply(NodeRanks(0, "a", 0, 0))
        view.apply(NodeRanks(1, "b", 1, 1))
    here, there = views
    here.apply(HostSample(1.0, (1, 2), (3, 4), None, 5.0))
    for node in range(2):
        here.apply(HostSample(50.0 + node, (1, 2), None, None, 5.0, node=node))
    apply_live(there, [*live_events(here)])
    assert there.host == here.host
    assert there.node_loads == here.node_loads
    assert len(there.node_loads) == 2
