"""The Ray actor that is the agent of one node: Ray imports it in a process of that node, in the job's runtime environment."""

from __future__ import annotations

import os

from accelerate_nb.launching.joining.join_ticket import JoinTicket
from accelerate_nb.launching.joining.joined_agent import JoinedAgent


class AgentActor:
    """An agent that connects back to the process that launches, and serves it until that ends."""

    def serve(self, ticket: str, bundle: int, threads: int) -> None:
        """Serve in the bundle of this number; each rank computes with so many threads, unless the runtime environment says otherwise."""
        import ray

        # Ray has set that to the number of cores of the whole actor
        if "OMP_NUM_THREADS" not in ray.get_runtime_context().runtime_env.get("env_vars", {}):
            os.environ["OMP_NUM_THREADS"] = str(threads)
        # where this bundle is now: after a loss Ray moves it
        name = f"{bundle} {ray.get_runtime_context().get_node_id()}"
        JoinedAgent(JoinTicket.parse(ticket), name).serve()
