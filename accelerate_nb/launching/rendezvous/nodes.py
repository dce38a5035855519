"""The rendezvous of this node with the others of a run, before anything of it starts."""

from __future__ import annotations

from dataclasses import replace

from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.devices.probe import probe
from accelerate_nb.launching.nodes.node_placement import fixed_mesh
from accelerate_nb.launching.planning.placement import Placement, check_training
from accelerate_nb.launching.rendezvous.host import RendezvousHost
from accelerate_nb.launching.rendezvous.hosted_run import HostedNodes
from accelerate_nb.launching.rendezvous.join import join
from accelerate_nb.launching.rendezvous.joined_run import JoinedNodes
from accelerate_nb.launching.rendezvous.settings import RendezvousSettings, check_name, hosts, listen, local_placement


def join_nodes(config: RunConfig) -> tuple[Placement, HostedNodes | JoinedNodes]:
    """
    Wait until all nodes of a run have come; the placement is that of all ranks.

    Raises `LaunchError` where they don't come in time, or run other versions, or don't fit together or the settings.
    """
    settings, local = RendezvousSettings.of(config.launching), local_placement(config, probe())
    check_name(settings)
    listener = listen(settings) if hosts(settings) else None
    nodes: HostedNodes | JoinedNodes
    if listener is None:
        nodes = JoinedNodes(join(settings, local), local)
    else:
        rendezvous = RendezvousHost(settings, listener, local, config.launching.max_restarts).wait()
        mesh = fixed_mesh(config.training)
        fixed = f"the run has {mesh}, whose mesh has a fixed number of processes" if mesh else ""
        nodes = HostedNodes(rendezvous, local, settings, config.launching.max_restarts, fixed)
    placement = replace(local, size=sum(nodes.sizes))
    try:
        check_training(config, placement)
    except BaseException:
        nodes.close()
        raise
    return placement, nodes
