"""The nodes of a run from one attempt to the next: after a loss others take part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from accelerate_nb.errors import LaunchError
from accelerate_nb.events.model import NodeRanks
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.group_runner import GroupRunner
from accelerate_nb.launching.node_agent.node_facts import facts_of_this_node
from accelerate_nb.launching.nodes.node_pool import lease, open_group, release
from accelerate_nb.launching.nodes.node_sizes import Host
from accelerate_nb.launching.nodes.peer_reach import of_all
from accelerate_nb.launching.nodes.run_nodes import RunNodes
from accelerate_nb.launching.nodes.spare_nodes import NodeRoster, came_text, leave_out, reachable_change
from accelerate_nb.launching.nodes.version_table import check_versions
from accelerate_nb.launching.planning.plan import LaunchPlan
from accelerate_nb.launching.run_context import RunContext
from accelerate_nb.transport.rank_info import LOOPBACK


class AttemptNodes:
    """The nodes on which a run's next attempt starts; `nodes` are those of the first."""

    def __init__(self, nodes: RunNodes) -> None:
        self._nodes = nodes
        # hosts that were left out, those of the last loss apart
        self._left_out: list[Host] = []
        self._just_left_out: list[Host] = []

    @property
    def node_ranks(self) -> list[NodeRanks]:
        """The ranks of each node."""
        return ranks_of_nodes(self._nodes.names, self._nodes.sizes)

    @property
    def may_be_fewer(self) -> bool:
        """Whether the run may go on with fewer nodes, and with fewer ranks."""
        return self._nodes.min_nodes is not None

    def replace_lost(self, ranks: Collection[int]) -> str:
        """
        Have others take the places of the nodes of these ranks, or go on without them where there may be fewer.

        Others are those that the engine gives, and then spares.

        Returns a sentence, which is empty where nothing changes.
        """
        roster = NodeRoster(self._nodes.names, self._nodes.sizes, self._nodes.spares)
        found = {node: self._nodes.engine.replacement(roster.names[node]) for node in roster.nodes_of(ranks)}
        # where an agent has started on its own machine again, nothing changes
        lost = [node for node, name in found.items() if name != roster.names[node]]
        given = tuple(Host(name, roster.sizes[node]) for node in lost if (name := found[node]) is not None)
        roster = replace(roster, spares=(*given, *roster.spares))
        change = reachable_change(roster, lost, self._can_reach) or leave_out(roster, lost, self._nodes.min_nodes)
        if change is None:
            return ""
        changed = change.roster
        if len(changed.names) < len(roster.names):
            self._just_left_out += [Host(roster.names[node], roster.sizes[node]) for node in lost]
        self._nodes = replace(self._nodes, names=changed.names, sizes=changed.sizes, spares=changed.spares)
        return change.text

    @property
    def has_newcomers(self) -> bool:
        """Never: hosts that come back wait for the next restart."""
        return False

    def are_new(self, ranks: Collection[int]) -> bool:
        """Never: a host that came back is one of the run's own."""
        return False

    def take_newcomers(self) -> str:
        """Take in hosts that were left out at a restart before this one, and can be reached again; returns a sentence, or an empty text."""
        candidates = self._left_out
        are_there = of_all(lambda host: self._can_reach(host.name), candidates) if candidates else []
        back = tuple(host for host, is_there in zip(candidates, are_there, strict=True) if is_there)
        nodes = replace(
            self._nodes,
            names=(*self._nodes.names, *(host.name for host in back)),
            sizes=(*self._nodes.sizes, *(host.slots or 0 for host in back)),
        )
        if back and _can_start(nodes):
            self._nodes = nodes
        else:
            back = ()
        self._left_out = [*(host for host in candidates if host not in back), *self._just_left_out]
        self._just_left_out = []
        return came_text([host.name for host in back], sum(nodes.sizes), "come back") if back else ""

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


def _can_start(nodes: RunNodes) -> bool:
    """Whether all nodes have the versions of this process, and reach each other."""
    try:
        group = open_group(nodes.engine, nodes.names, 0)
        for connection in group.connections:
            release(connection, is_usable=True)
        check_versions(
            facts_of_this_node(LOOPBACK), {connection.name: connection.facts for connection in group.connections}
        )
    except LaunchError:
        return False
    return True


def ranks_of_nodes(names: Sequence[str], sizes: Sequence[int]) -> list[NodeRanks]:
    """The ranks of each node, in order."""
    lasts = [sum(sizes[: node + 1]) - 1 for node in range(len(sizes))]
    return [
        NodeRanks(node, name, last - size + 1, last)
        for node, (name, size, last) in enumerate(zip(names, sizes, lasts, strict=True))
    ]
