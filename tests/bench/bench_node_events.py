"""What the events of many ranks cost the notebook's process: real agents of nodes that are not there, each rank with ten lines a second."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from accelerate_nb import launch
from accelerate_nb.launching.node_agent.remote_agent import RemoteAgent
from accelerate_nb.launching.nodes import node_pool, run_nodes
from accelerate_nb.transport.channel import ReceivedMessage
from tests.bench.rows import Row, main
from tests.bench.simulated_nodes import LINES_A_SECOND, SECONDS_VARIABLE, SimulatedNodes

RANKS_OF_A_NODE = 8
SIZES = (2, 8, 32, 128, 1024)


def measure(ranks: int, seconds: float) -> list[Row]:
    """The share of a core that the notebook's process takes for a run of so many ranks, and the messages that come."""
    nodes = max(2, ranks // RANKS_OF_A_NODE)
    with (
        SimulatedNodes(min(nodes, 8)) as simulated,
        mock.patch.object(run_nodes.node_pool, "LocalNodes", return_value=simulated),
        mock.patch.dict(os.environ, {SECONDS_VARIABLE: str(2 * seconds)}),
        tempfile.TemporaryDirectory() as folder,
        counted() as messages,
    ):
        settings = {"engine": "local", "cpu": True, "config_file": "", "panel": "off", "folder": folder}
        run = launch(int, num_processes=ranks, num_nodes=nodes, **settings)
        while not all(summary.state == "running" for summary in run.view.glances()):
            time.sleep(0.05)
        time.sleep(1.0)
        begin, cpu, lines, before = time.monotonic(), time.process_time(), run.view.line_count, len(messages)
        time.sleep(seconds)
        taken = time.monotonic() - begin
        share = (time.process_time() - cpu) / taken
        arrived, came = run.view.line_count - lines, len(messages) - before
        run.wait(120)
        node_pool.close_nodes()
    written = ranks * LINES_A_SECOND
    return [
        Row(f"{ranks} ranks on {nodes} nodes: the notebook's process", 100 * share, "% of a core"),
        Row("  lines that arrived", arrived / taken, "a second", arrived / taken / written, "those written"),
        Row("  messages", came / taken, "a second", came / taken / nodes, "the nodes"),
    ]


@contextmanager
def counted() -> Iterator[list[None]]:
    messages: list[None] = []
    take = RemoteAgent._take

    def counting(agent: RemoteAgent, received: ReceivedMessage) -> bool:
        messages.append(None)
        return take(agent, received)

    with mock.patch.object(RemoteAgent, "_take", counting):
        yield messages


if __name__ == "__main__":
    main(
        lambda given: [row for ranks in given.ranks for row in measure(ranks, given.seconds)],
        *(__doc__, None),
        decimals=1,
        seconds={"type": float, "default": 10.0, "help": "how long each number of ranks is measured"},
        ranks={"type": int, "nargs": "+", "default": SIZES, "help": "the numbers of ranks"},
    )
