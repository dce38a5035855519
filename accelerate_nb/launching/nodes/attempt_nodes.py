"""The nodes of a run from one attempt to the next: after a loss others take part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from accelerate_nb.errors import LaunchError
from accelerate_nb.events.model import NodeRanks
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.group_runner import GroupRunner
from accelerate_nb.launching.node_agent.node_facts import facts_of_this_node
from accelerate_nb.launching.nodes.node_pool import lease, release
from accelerate_nb.launching.nodes.node_sizes import Host
from accelerate_nb.launching.nodes.run_nodes import RunNodes
from accelerate_nb.launching.nodes.spare_nodes import NodeRoster, leave_out, ranks_of_nodes, reachable_change
from accelerate_nb.launching.nodes.version_table import check_versions
from accelerate_nb.launching.planning.plan import LaunchPlan
from accelerate_nb.launching.run_context import RunContext
from accelerate_nb.transport.rank_info import LOOPBACK


class AttemptNodes:
    """The nodes on which a run's next attempt starts; `nodes` are those of the first."""

    def __init__(self, nodes: RunNodes) -> None:
        self._nodes = nodes

    @property
    def node_ranks(self) -> list[NodeRanks]:
        """The ranks of each node."""
        return ranks_of_nodes(self._nodes.names, self._nodes.sizes)

    @property
    def ranks_here(self) -> range | None:
        """The ranks on this machine: all, or none that is known."""
        return self._nodes.ranks_here

    @property
    def retries_at_once(self) -> bool:
        """Whether an attempt that was lost before it began is made once more, on as many nodes."""
        return self._nodes.min_nodes is None

    def next_nodes(self, lost: Collection[int], is_stopped: Callable[[], bool]) -> str:
        """
        Have others take the places of the nodes of these ranks, or go on without them where there may be fewer.

        Others are those that the engine gives, and then spares. Returns a sentence, which is empty where nothing changes.
        """
        roster = NodeRoster(self._nodes.names, self._nodes.sizes, self._nodes.spares)
        found = {node: self._nodes.engine.replacement(roster.names[node]) for node in roster.nodes_of(lost)}
        # where an agent has started on its own machine again, nothing changes
        gone = [node for node, name in found.items() if name != roster.names[node]]
        given = tuple(Host(name, roster.sizes[node]) for node in gone if (name := found[node]) is not None)
        roster = replace(roster, spares=(*given, *roster.spares))
        change = reachable_change(roster, gone, self._can_reach) or leave_out(roster, gone, self._nodes.min_nodes)
        if change is None:
            return ""
        changed = change.roster
        self._nodes = replace(self._nodes, names=changed.names, sizes=changed.sizes, spares=changed.spares)
        return change.text

    def leave(self, reason: str) -> None:
        """Agents stay for the next launch."""

    def worker_group(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> GroupRunner:
        """The runner of one attempt; raises `LaunchError` where a node can't be reached."""
        plan = replace(plan, size=sum(self._nodes.sizes), node_sizes=self._nodes.sizes)
        try:
            return self._nodes.worker_group(plan, engine, run_context, number)
        except LaunchError as error:
            if number == 0:
                raise
            raise LaunchError(
                f"{error}\nThe run was to start again, and no spare host could take its place. List one beyond those that the "
                "processes need, each with its slots: hosts=['a:2', 'b:2', 'c:2'] with num_processes=4, or in an allocation of three nodes "
                "num_nodes=2. Or let the run go on with fewer nodes and processes: num_nodes='1:2'."
            ) from None

    def _can_reach(self, name: str) -> bool:
        try:
            (connection,) = lease(self._nodes.engine, [name])
            release(connection, is_usable=True)
            check_versions(facts_of_this_node(LOOPBACK), {name: connection.facts})
        except LaunchError:
            return False
        return True
