"""Operations between XLA devices give what gloo gives between processes on CPUs."""

import os
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator, utils
from accelerate_nb.local_sgd import LocalSGD
from tests.ranks import run_on_ranks
from tests.runtime.data.loaders import typed
from tests.runtime.operations.test_as_accelerate import drawn
from tests.xla.weights import fixed

# Two processes that import torch_xla and torch once more, and a good hundred small programs to compile.
pytestmark = pytest.mark.slow

Pair = namedtuple("Pair", ["first", "second"])

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
]


def nests(rank: int, device: torch.device) -> dict[str, Any]:
    """One of each kind of tensor, on the device, and nests of them."""
    tensors = {
        "no dimensions": torch.tensor(1.5 + rank),
        "no dimensions, and the rank": torch.tensor(rank),
        "nothing in it": torch.empty(0),
        "a dimension of zero": torch.empty(2, 0, 3),
        "transposed": drawn(rank, 4, 3).t(),
        "of 1.2 MB": drawn(rank, 300, 1000),
        **{str(dtype): drawn(rank, 5, dtype=dtype) for dtype in DTYPES},
    }
    pair = Pair(drawn(rank, 2), [drawn(rank, 2, 2)])
    nest = {"list": [drawn(rank, 3, 2), (drawn(rank, 3),)], "pair": pair, "none": []}
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    return {**placed, "nest": utils.send_to_device(nest, device), "on the CPU": drawn(rank, 3)}


def everything() -> dict[str, Any]:
    """What every operation makes of everything, in plain values."""
    accelerator = Accelerator(cpu="PJRT_DEVICE" not in os.environ)
    given = nests(accelerator.process_index, accelerator.device)
    accelerator.wait_for_everyone()
    found = of_tensors(accelerator, given)
    messages = misfits(accelerator)
    objects = of_objects(accelerator)
    accelerator.wait_for_everyone()
    return {
        "found": {name: typed(value) for name, value in {**found, **objects}.items()},
        "messages": messages,
        "device": str(accelerator.device),
        "uneven": typed(uneven(accelerator)),
        "gradient": gradient(accelerator),
        "dispatched": typed(dispatched(accelerator)),
        "averaged": typed(averaged(accelerator)),
        "seeds": seeds(accelerator),
    }


def of_tensors(accelerator: Any, given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, nest in given.items():
        found[f"gather, {name}"] = accelerator.gather(nest)
        found[f"broadcast, {name}"] = utils.broadcast(nest, from_process=1)
        found[f"pad, {name}"] = accelerator.pad_across_processes(nest)
        found[f"metrics, {name}"] = accelerator.gather_for_metrics(nest)
        for reduction in ("sum", "mean", "max", "min"):
            if "complex" in name and reduction in ("max", "min"):
                continue
            found[f"reduce {reduction}, {name}"] = accelerator.reduce(nest, reduction)
    return found


def of_objects(accelerator: Any) -> dict[str, Any]:
    """What is no tensor of a device's concerns the hosts alone."""
    rank = accelerator.process_index
    if rank == 1:
        accelerator.set_trigger()
    return {
        "objects": utils.gather_object([rank, "text", {"a": Pair(rank, None)}]),
        "many objects": utils.gather_object(["x" * 30000 * (rank + 1)]),
        "objects of one": utils.broadcast_object_list([rank, None, "y" * 9000 * (rank + 1)], from_process=1),
        "objects as metrics": accelerator.gather_for_metrics([rank, "sample"]),
        "triggers": [accelerator.check_trigger(), accelerator.check_trigger()],
    }


def misfits(accelerator: Any) -> list[str]:
    """Calls that differ between ranks."""
    rank, device = accelerator.process_index, accelerator.device
    calls: list[Callable[[], Any]] = [
        lambda: accelerator.gather(torch.ones(2 + rank, device=device)),
        lambda: accelerator.gather([torch.ones(1, device=device)] * (1 + rank)),
        lambda: accelerator.reduce(torch.ones(5, device=device, dtype=torch.float16 if rank else torch.float32)),
        lambda: utils.broadcast(torch.ones(2, device=device), from_process=rank),
        lambda: utils.gather_object([1]) if rank else accelerator.gather(torch.ones(50000, device=device)),
        lambda: accelerator.gather("text"),
    ]
    messages = []
    for call in calls:
        try:
            messages.append(f"nothing raised: {call()}")
        except (RuntimeError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def uneven(accelerator: Any) -> dict[str, Any]:
    """What each rank asks something else of its device for."""
    rank, device = accelerator.process_index, accelerator.device
    before = accelerator.gather(torch.full((2,), float(rank)).to(device))
    second = torch.full((2, 3 - rank), rank).to(device)
    given = {"first": torch.full((rank + 1, 2), float(rank)).to(device), "second": [second]}
    padded = [accelerator.pad_across_processes(given, dim=dim, pad_index=7, pad_first=dim == 0) for dim in (0, 1)]
    padded[0] = accelerator.pad_across_processes(padded[0], dim=1)
    joined = accelerator.gather(padded[0])
    copied = utils.copy_tensor_to_devices(torch.arange(4.0).to(device) if rank == 1 else None)
    pending = torch.arange(3, device=device) * 2
    accelerator.wait_for_everyone()
    return {
        "before": before,
        "padded": padded,
        "joined": joined,
        "copied": copied,
        "object": utils.gather_object([pending]),
    }


def gradient(accelerator: Any) -> list[float]:
    mine = torch.tensor([1.0, 2.0]).to(accelerator.device).requires_grad_()
    (accelerator.reduce(mine, "mean") * torch.tensor([3.0, 5.0]).to(accelerator.device)).sum().backward()
    accelerator.wait_for_everyone()
    assert mine.grad is not None
    return mine.grad.tolist()


def dispatched(accelerator: Any) -> list[Any]:
    """Batches that the main process reads for all, with an end that does not divide."""
    rows = [{"x": torch.tensor([float(row), 0.5]), "y": row} for row in range(7)]
    accelerator.dataloader_config.dispatch_batches = True
    found = []
    for batch in accelerator.prepare_data_loader(torch.utils.data.DataLoader(rows, batch_size=2)):
        assert batch["x"].device == accelerator.device
        joined = accelerator.gather_for_metrics(batch["y"])
        accelerator.wait_for_everyone()
        found += [batch, joined]
    return found


def averaged(accelerator: Any) -> list[Any]:
    """Local steps, after which the copies are averaged."""
    model = fixed(torch.nn.Linear(2, 1)).to(accelerator.device)
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
        for step in range(3):
            with torch.no_grad():
                shift = torch.full((2,), 1.0 + step + accelerator.process_index).to(accelerator.device)
                model.weight.add_(shift)
            local_sgd.step()
    accelerator.wait_for_everyone()
    return [parameter.detach() for parameter in model.parameters()]


def seeds(accelerator: Any) -> list[Any]:
    """The device's numbers after each seed, and once they were made equal."""
    rng_type = "xla" if accelerator.device.type == "xla" else "torch"
    drawn: list[Any] = []
    for device_specific in (True, True, False):
        utils.set_seed(5, device_specific=device_specific)
        accelerator.wait_for_everyone()
        drawn.append(torch.rand(2, device=accelerator.device))
    utils.set_seed(5, device_specific=True)
    utils.synchronize_rng_states([rng_type])
    drawn.append(torch.rand(2, device=accelerator.device))
    accelerator.wait_for_everyone()
    return [item.tolist() for item in drawn]


def counts() -> dict[str, int]:
    """How much was compiled, run and read so far by this process."""
    import torch_xla.debug.metrics as metrics

    names = ("CompileTime", "ExecuteTime", "ExecuteReplicatedTime", "TransferFromDeviceTime")
    return {name: (metrics.metric_data(name) or (0,))[0] for name in names}


@pytest.fixture(scope="module")
def both(launched_on_xla: Callable[..., list[Any]]) -> tuple[list[Any], list[Any]]:
    return launched_on_xla(everything, num_processes=2), run_on_ranks(everything, 2)


def test_every_operation_gives_what_gloo_gives(both: tuple[list[Any], list[Any]]) -> None:
    for ours, theirs in zip(*both, strict=True):
        assert ours["device"] == "xla:0"
        found = {name: (ours["found"].get(name), wanted) for name, wanted in theirs["found"].items()}
        assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
        # also what ranks do together, and calls that do not fit together are an error on all
        for what in ("uneven", "gradient", "dispatched", "averaged", "messages"):
            assert ours[what] == theirs[what], what
        assert all("Error: " in our for our in ours["messages"])


def test_the_generators_of_devices_are_seeded_and_made_equal(both: tuple[list[Any], list[Any]]) -> None:
    (first, again, same, equal), (other, _, others_same, others_equal) = (item["seeds"] for item in both[0])
    assert first == again != other
    assert same == others_same == first
    assert equal == others_equal == first


def reads_by_itself() -> list[float]:
    """What one rank reads of operations alone, while the other goes on."""
    accelerator = Accelerator()
    mine = torch.ones(2, device=accelerator.device) * 3
    everyones, total = accelerator.gather(mine), accelerator.reduce(mine.sum(), "sum")
    read = [everyones.sum().item(), total.item()] if accelerator.is_main_process else []
    accelerator.wait_for_everyone()
    return read


def test_one_rank_may_read_what_ranks_computed_together(on_xla: Callable[..., list[Any]]) -> None:
    assert on_xla(reads_by_itself, num_processes=2) == [[12.0, 12.0], []]
