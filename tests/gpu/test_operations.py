"""Tensors on GPUs reach the other ranks, and calls that differ are an error there, too: over NCCL, and over gloo."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate_nb import Accelerator
from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.operations import sharded_tensors
from accelerate_nb.runtime.operations.transfer import CollectiveCall, agree
from accelerate_nb.utils import InitProcessGroupKwargs, broadcast, gather_object
from tests.gpu.devices import compute_for, finish
from tests.ranks import run_on_ranks

# More than travels with the check of a call.
LARGE = 1 << 20


def connected(device: str, backend: str | None = None) -> Accelerator:
    """
    This process's accelerator, whose group exists also where it is the only rank.

    With a `backend`, several ranks may share a GPU, which NCCL refuses.
    """
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend or ("nccl" if device == "cuda" else "gloo"))
    return Accelerator(cpu=device == "cpu", kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])


def everything(device: str, backend: str | None = None) -> dict[str, Any]:
    """What each operation gives on this rank, as plain numbers."""
    accelerator = connected(device, backend)
    rank = accelerator.process_index
    assert accelerator.device.type == device
    small = torch.full((3,), rank + 1.0, device=accelerator.device)
    large = torch.full((LARGE,), rank + 1.0, device=accelerator.device)
    ragged = torch.full((rank + 1, 2), rank + 1, device=accelerator.device)
    results: dict[str, Any] = {
        "gather": accelerator.gather(small),
        "gather large": accelerator.gather(large)[::LARGE],
        "gather half": accelerator.gather(small.bfloat16()).float(),
        "sum": accelerator.reduce(small, "sum"),
        "mean": accelerator.reduce(small, "mean"),
        "sum large": accelerator.reduce(large, "sum")[:1],
        "broadcast": broadcast(small.clone()),
        "broadcast large": broadcast(large)[:1],
        "padded": accelerator.gather(accelerator.pad_across_processes(ragged))[:, 0],
    }
    assert all(result.device == accelerator.device for result in results.values())
    bare = small.clone()
    dist.all_reduce(bare)
    results["bare"] = bare
    objects = gather_object([rank])
    accelerator.wait_for_everyone()
    return {
        **{name: tensor.tolist() for name, tensor in results.items()},
        "objects": objects,
        "backend": dist.get_backend(),
    }


def expected(size: int) -> dict[str, Any]:
    """The same, by hand."""
    ranks = [rank + 1.0 for rank in range(size)]
    joined = [rank for rank in ranks for _ in range(3)]
    padded = [rank + 1 if row <= rank else 0 for rank in range(size) for row in range(size)]
    total = sum(ranks)
    return {
        "gather": joined,
        "gather large": ranks,
        "gather half": joined,
        "sum": [total] * 3,
        "mean": [total / size] * 3,
        "sum large": [total],
        "broadcast": [1.0] * 3,
        "broadcast large": [1.0],
        "padded": padded,
        "bare": [total] * 3,
        "objects": list(range(size)),
    }


def test_operations_over_the_devices_own_backend(
    launched: Callable[..., list[dict[str, Any]]], device: str, ranks: int
) -> None:
    wanted = {**expected(ranks), "backend": "nccl" if device == "cuda" else "gloo"}
    assert launched(everything, device) == [wanted] * ranks


def test_operations_of_two_ranks_that_share_a_device_over_gloo(device: str) -> None:
    assert run_on_ranks(everything, 2, device, "gloo") == [{**expected(2), "backend": "gloo"}] * 2


def differing(device: str, backend: str | None) -> tuple[str, list[float]]:
    """What is said of calls that differ, and what the next call gives."""
    accelerator = connected(device, backend)
    rank = accelerator.process_index
    with pytest.raises(OperationError) as caught:
        accelerator.gather(torch.ones(2 + rank, device=accelerator.device))
    total = accelerator.reduce(torch.ones(2, device=accelerator.device), "sum")
    return str(caught.value), total.tolist()


def assert_every_call_is_named(found: list[tuple[str, list[float]]]) -> None:
    """Every rank names the calls of all, and the next call works."""
    for message, total in found:
        assert all(f"  rank {rank}: gather(" in message for rank in range(len(found))), message
        assert total == [float(len(found))] * 2


def test_calls_that_differ_are_an_error_on_ranks_that_share_a_device(device: str) -> None:
    assert_every_call_is_named(run_on_ranks(differing, 2, device, "gloo"))


def test_calls_that_differ_are_an_error_on_ranks_of_their_own_devices(
    launched: Callable[..., list[tuple[str, list[float]]]], device: str, ranks: int
) -> None:
    if ranks == 1:
        pytest.skip("calls of one rank can't differ: this takes two GPUs")
    assert_every_call_is_named(launched(differing, device, None))


# --------------------------------------------------------------------------------------------------- beside a busy device

BUSY = 2.0


def seconds_beside_computation(accelerator: Accelerator, act: Callable[[], object]) -> float:
    """How long the host is kept by an action that follows two seconds of computation on a GPU; there is none on the CPU."""
    for _ in range(3):
        act()
    finish(accelerator.device)
    if accelerator.device.type == "cuda":
        compute_for(BUSY, accelerator.device)
    began = time.perf_counter()
    act()
    seconds = time.perf_counter() - began
    finish(accelerator.device)
    return seconds if accelerator.device.type == "cuda" else 0.0


def seconds_of_a_check(device: str, backend: str | None) -> float:
    accelerator = connected(device, backend)
    return seconds_beside_computation(
        accelerator, lambda: agree(accelerator.state.world, CollectiveCall("gather", "a tensor"))
    )


def seconds_of_a_step(device: str) -> float:
    accelerator = connected(device)
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    inputs = torch.ones(8, 64, device=accelerator.device)

    def step() -> None:
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()

    return seconds_beside_computation(accelerator, step)


def test_the_check_of_a_call_does_not_wait_for_what_the_device_computes(
    launched: Callable[..., list[float]], device: str, ranks: int
) -> None:
    is_shared = ranks == 1  # one process has nobody to compare its calls with
    found = (
        run_on_ranks(seconds_of_a_check, 2, device, "gloo") if is_shared else launched(seconds_of_a_check, device, None)
    )
    assert max(found) < BUSY / 2


def test_a_step_does_not_wait_for_what_the_device_computes(launched: Callable[..., list[float]], device: str) -> None:
    assert max(launched(seconds_of_a_step, device)) < BUSY / 2


def test_the_norm_of_gradients_on_the_host_takes_one_copy(device):
    """Each copy waits for the device: a model has hundreds of weights."""

    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.count += func is torch.ops.aten._to_copy.default and "device" in (kwargs or {})
            return result

    gradients = [torch.full((3,), float(number)) for number in range(100)]
    with Copies() as copies:
        found = sharded_tensors.norm(gradients, 2.0, torch.device(device))
    assert copies.count == (device != "cpu")
    torch.testing.assert_close(found.cpu(), torch.cat(gradients).norm())
