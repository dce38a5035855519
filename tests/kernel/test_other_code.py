"""Code that knows nothing of this package finds its ranks in a worker."""

import pytest

from tests.kernel.kernels import Kernel


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
