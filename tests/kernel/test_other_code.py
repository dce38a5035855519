"""Code that knows nothing of this package finds its ranks in a worker."""

from __future__ import annotations

import pytest

from tests.kernel.kernels import Kernel

METHODS = ["supervisor", "fork", "spawn"]


@pytest.mark.parametrize("method", METHODS)
def test_plain_torch_finds_its_ranks_in_the_environment(kernel: Kernel, method: str) -> None:
    kernel.ok(f"""
    import torch, torch.distributed as dist
    def plain():
        dist.init_process_group("gloo", init_method="env://")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        size = dist.get_world_size()
        dist.destroy_process_group()
        return dist.is_torchelastic_launched(), size, total.item()
    plain_torch = notebook_launcher(plain, num_processes=2, start_method={method!r}, results="all")
    """)
    assert kernel.value("plain_torch") == [[True, 2, 3.0]] * 2


def test_a_device_mesh_is_made(kernel: Kernel) -> None:
    kernel.ok("""
    def meshed():
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
        return mesh.get_local_rank("data"), mesh.size()
    mesh = notebook_launcher(meshed, num_processes=2, results="all")
    """)
    assert kernel.value("mesh") == [[0, 2], [1, 2]]


def test_the_store_is_there_until_the_last_rank_has_returned(kernel: Kernel) -> None:
    kernel.ok("""
    import os, time
    from torch.distributed import TCPStore
    def returns_late():
        if os.environ["RANK"] == "0":
            return "early"
        time.sleep(0.5)
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        store.set("said", "late")
        return store.get("said").decode()
    late = notebook_launcher(returns_late, num_processes=2, results="all")
    """)
    assert kernel.value("late") == ["early", "late"]


def test_plain_ddp_averages_gradients(kernel: Kernel) -> None:
    kernel.ok("""
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    def trained():
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
        return model.module.weight.grad.tolist()
    gradients = notebook_launcher(trained, num_processes=2, results="all")
    """)
    assert kernel.value("gradients") == [[[0.5, 0.5, 0.5]]] * 2


def test_lightning_fabric_finds_its_ranks(kernel: Kernel) -> None:
    pytest.importorskip("lightning_fabric")
    kernel.ok("""
    def with_fabric():
        import torch
        from lightning_fabric import Fabric
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        total = fabric.all_reduce(torch.tensor(float(fabric.global_rank + 1)), reduce_op="sum")
        model = fabric.setup(torch.nn.Linear(2, 1))
        return fabric.global_rank, fabric.world_size, total.item(), type(model._forward_module).__name__
    fabric = notebook_launcher(with_fabric, num_processes=2, results="all")
    """)
    assert kernel.value("fabric") == [
        [0, 2, 3.0, "DistributedDataParallel"],
        [1, 2, 3.0, "DistributedDataParallel"],
    ]


def test_the_accelerator_of_accelerate_finds_its_ranks(kernel: Kernel) -> None:
    pytest.importorskip("accelerate")
    kernel.ok("""
    def with_accelerate():
        import torch
        from accelerate import Accelerator
        theirs = Accelerator()
        gathered = theirs.gather(torch.tensor([theirs.process_index + 1]))
        return theirs.process_index, theirs.num_processes, gathered.tolist(), theirs.mixed_precision
    theirs = notebook_launcher(with_accelerate, num_processes=2, mixed_precision="bf16", results="all")
    """)
    assert kernel.value("theirs") == [[0, 2, [1, 2], "bf16"], [1, 2, [1, 2], "bf16"]]
