"""The nodes of a run's next attempt: spares take the places of lost ones, or it goes on with fewer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.events.model import NodeRanks
from accelerate_nb.launching.nodes.node_placement import Host


@dataclass(frozen=True, slots=True)
class NodeRoster:
    """The names of a run's nodes, in order, the number of ranks of each, and the hosts that are there in case one is lost."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    spares: tuple[Host, ...] = ()

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        first = sum(self.sizes[:node])
        return range(first, first + self.sizes[node])

    def nodes_of(self, ranks: Collection[int]) -> list[int]:
        """The nodes that have some of these ranks."""
        return [node for node in range(len(self.names)) if not set(ranks).isdisjoint(self.ranks_of(node))]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """The nodes with which a run starts again after some were lost, the names of those that are new, and a sentence for people."""

    roster: NodeRoster
    new: tuple[str, ...]
    text: str


def split_spares(num_processes: int | None, hosts: Sequence[Host]) -> tuple[tuple[Host, ...], tuple[Host, ...]]:
    """
    The hosts that so many processes need, filled in their order, and those beyond, which are spares; all of them have slots.

    >>> split_spares(4, [Host("a", 2), Host("b", 2), Host("c", 2)])
    ((Host(name='a', slots=2), Host(name='b', slots=2)), (Host(name='c', slots=2),))
    """
    if num_processes is None or any(host.slots is None for host in hosts):
        return tuple(hosts), ()
    room = 0
    for count, host in enumerate(hosts, 1):
        room += host.slots or 0
        if room >= num_processes:
            return tuple(hosts[:count]), tuple(hosts[count:])
    return tuple(hosts), ()


def replace_lost(roster: NodeRoster, lost: Collection[int]) -> NodeChange | None:
    """
    The nodes with a spare in the place of each lost one; pure. `None` where there are not enough spares with room for its ranks.

    A lost host is the last of the spares from then on: it may come back.

    >>> roster = NodeRoster(("a", "b"), (2, 2), (Host("c", 2),))
    >>> replace_lost(roster, [1]).text
    'node b was lost; ranks 2-3 start again on c'
    """
    names, spares, texts = list(roster.names), list(roster.spares), []
    for node in sorted(lost):
        spare = next((host for host in spares if (host.slots or 0) >= roster.sizes[node]), None)
        if spare is None:
            return None
        spares.remove(spare)
        names[node] = spare.name
        ranks = of_ranks(roster.ranks_of(node))
        verb = "starts" if roster.sizes[node] == 1 else "start"
        texts.append(f"{_called(roster.names[node])} was lost; {ranks} {verb} again on {spare.name}")
    returning = [Host(roster.names[node], roster.sizes[node]) for node in sorted(lost)]
    new = tuple(names[node] for node in sorted(lost))
    return NodeChange(NodeRoster(tuple(names), roster.sizes, (*spares, *returning)), new, "; ".join(texts))


def leave_out(roster: NodeRoster, lost: Collection[int], min_nodes: int | None) -> NodeChange | None:
    """
    The nodes without those that were lost, with fewer ranks; pure. `None` where fewer than `min_nodes` are left, or all are needed.

    >>> leave_out(NodeRoster(("a", "b"), (2, 2)), [1], min_nodes=1).text
    'node b was lost; 2 of 4 ranks start again, on a'
    """
    left = [node for node in range(len(roster.names)) if node not in lost]
    if min_nodes is None or len(left) < max(min_nodes, 1) or not lost:
        return None
    names, sizes = tuple(roster.names[node] for node in left), tuple(roster.sizes[node] for node in left)
    gone = [_called(roster.names[node]) for node in sorted(lost)]
    subject = f"{' and '.join(gone)} {'was' if len(gone) == 1 else 'were'}"
    verb = "starts" if sum(sizes) == 1 else "start"
    text = f"{subject} lost; {sum(sizes)} of {sum(roster.sizes)} ranks {verb} again, on {', '.join(names)}"
    return NodeChange(NodeRoster(names, sizes, roster.spares), (), text)


def came_text(names: Sequence[str], ranks: int) -> str:
    """
    The sentence about nodes that take part from now on, so that there are so many ranks.

    >>> came_text(["node 2 on c"], 6)
    'node 2 on c has come; 6 ranks start again'
    """
    return f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} come; {ranks} ranks start again"


def _called(name: str) -> str:
    """A node in a sentence: hosts have names of their own, others are numbered."""
    return name if name.startswith("node ") else f"node {name}"


def reachable_change(roster: NodeRoster, lost: Collection[int], can_reach: Callable[[str], bool]) -> NodeChange | None:
    """The change with spares that can be reached; `None` where there are too few of them."""
    unreachable: set[str] = set()
    while lost:
        spares = tuple(host for host in roster.spares if host.name not in unreachable)
        change = replace_lost(NodeRoster(roster.names, roster.sizes, spares), lost)
        if change is None:
            return None
        missing = {name for name in change.new if not can_reach(name)}
        if not missing:
            return change
        unreachable |= missing
    return None


def ranks_of_nodes(names: Sequence[str], sizes: Sequence[int]) -> list[NodeRanks]:
    """The ranks of each node, in order."""
    lasts = [sum(sizes[: node + 1]) - 1 for node in range(len(sizes))]
    return [
        NodeRanks(node, name, last - size + 1, last)
        for node, (name, size, last) in enumerate(zip(names, sizes, lasts, strict=True))
    ]
