"""Everything that an engine needs to start a group of workers, and nothing more."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accelerate_nb.errors import LaunchError
from accelerate_nb.transport.payload import Payload
from accelerate_nb.transport.worker_spec import LOOPBACK, MasterAddress, ProcessEnvironment, RankInfo, WorkerSpec


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A group of `size` workers that run one payload; `port` is 0 where any free one will do."""

    payload: Payload
    size: int
    process_environment: ProcessEnvironment
    run: str
    port: int = 0
    max_restarts: int = 0
    # what ranks compute on, in torch's word
    kind: str = "cpu"
    # how many ranks are on each node, where there are several
    node_sizes: tuple[int, ...] = ()
    # whether the results of other ranks than the first of each node are received, too
    wants_all_results: bool = True

    def with_variables(self, variables: Mapping[str, str]) -> LaunchPlan:
        """The same plan, with more variables in the environment of its workers."""
        environ = {**self.process_environment.environ, **variables}
        return replace(self, process_environment=replace(self.process_environment, environ=environ))

    def specs(self, master: MasterAddress, restart_count: int) -> list[tuple[WorkerSpec, ...]]:
        """For each node the specs of its workers, in the order of their ranks; `master` is the store of their rendezvous."""
        sizes = self.node_sizes or (self.size,)
        firsts = [sum(sizes[:node]) for node in range(len(sizes))]
        return [
            tuple(
                WorkerSpec(
                    rank_info=RankInfo(
                        rank=rank,
                        size=self.size,
                        local_rank=rank - first,
                        local_size=size,
                        master=master,
                        run=self.run,
                        node_rank=node,
                        nodes=len(sizes),
                        restart_count=restart_count,
                        max_restarts=self.max_restarts,
                    ),
                    process_environment=self.process_environment,
                    payload=self.payload.reference,
                    kind=self.kind,
                    is_result_wanted=self.wants_all_results or rank in (0, first),
                )
                for rank in range(first, first + size)
            )
            for node, (first, size) in enumerate(zip(firsts, sizes, strict=True))
        ]


def host_store(sock: socket.socket) -> Any:
    """The store of a rendezvous in this process, on its listening socket, which it closes when it ends."""
    from torch.distributed import TCPStore

    host, port = sock.getsockname()
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=sock.detach())


def rendezvous_socket(port: int) -> socket.socket:
    """A socket that listens on loopback before any worker starts, so that no port can be lost to somebody else."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LOOPBACK, port))
        sock.listen(4096)
    except OSError as error:
        sock.close()
        raise LaunchError(
            f"use_port={port} was requested, but that port can't be had on this machine: {error.strerror}. "
            "Leave use_port out: any free port is found."
        ) from None
    return sock
