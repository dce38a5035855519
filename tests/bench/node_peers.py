"""How torchrun and Ray Train start two ranks on each of two nodes of this machine: until an all-reduce is done on all of them."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from accelerate_nb.errors import MissingExtraError
from tests.bench.rank_moments import note, noted, reduced

NODES, RANKS_OF_A_NODE = 2, 2
MEMORY = 80 << 20


def torchrun() -> float:
    """Milliseconds of one launch by torchrun, a command on each node."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--nnodes={NODES}", f"--nproc-per-node={RANKS_OF_A_NODE}", f"--master-port={port}"]
        command = [sys.executable, "-m", "torch.distributed.run", "--master-addr=127.0.0.1", *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        begin = time.time()
        nodes = [
            subprocess.Popen(
                [*command, f"--node-rank={node}", __file__, folder], env=environment, stderr=subprocess.DEVNULL
            )
            for node in range(NODES)
        ]
        assert [node.wait(120) for node in nodes] == [0] * NODES
        return 1e3 * (max(noted(folder, NODES * RANKS_OF_A_NODE)) - begin)


@contextmanager
def ray_cluster() -> Iterator[str]:
    """The address of a Ray cluster of two nodes; raises `MissingExtraError` where Ray is not installed."""
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError:
        raise MissingExtraError("Ray is not installed: python .ci/install_extra.py ray") from None
    # room for the agents that stay, and for the workers of Ray Train
    node: dict[str, Any] = {"num_cpus": 3 * RANKS_OF_A_NODE, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "node_name": "n1", "include_dashboard": False})
    cluster.add_node(**node, node_name="n2")
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def ray_train() -> float:
    """Milliseconds of one `fit` of Ray Train in the cluster that this process is connected to; `ImportError` where it is not installed."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            lambda config: note(config["folder"], reduced),
            train_loop_config={"folder": folder},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=NODES * RANKS_OF_A_NODE, placement_strategy="SPREAD"),
            run_config=RunConfig(storage_path=folder),
        )
        begin = time.time()
        trainer.fit()
        return 1e3 * (max(noted(folder, NODES * RANKS_OF_A_NODE)) - begin)


if __name__ == "__main__":
    note(sys.argv[1], reduced)
    dist.destroy_process_group()
