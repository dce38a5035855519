"""Training on GPUs: the numbers of a loop written by hand, in each precision, and a host that never waits for a step."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator
from accelerate_nb.runtime.data.shard import SideStreamCopier, one_copy_ahead
from accelerate_nb.runtime.observability import phase_timer
from accelerate_nb.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, GradScalerKwargs, ProfileKwargs
from tests.gpu.devices import compute_for, finish, is_pretended, synchronizing_is_an_error
from tests.ranks import run_on_ranks
from tests.waiting import until

STEPS, BATCH, WIDTH = 8, 32, 64


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    )


def data() -> TensorDataset:
    inputs = torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.flip(1))


def by_hand(device: str, dtype: torch.dtype | None) -> list[float]:
    """The losses of a loop with nothing but PyTorch."""
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for inputs, targets in DataLoader(data(), batch_size=BATCH):
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            outputs = model(inputs.to(device))
        loss = nn.functional.mse_loss(outputs.float(), targets.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(accelerator: Accelerator) -> tuple[nn.Module, Any, Any, list[torch.Tensor], Callable[[Any], None]]:
    """A model, its optimizer, its loader, where the losses go, and a step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(data(), batch_size=BATCH, pin_memory=accelerator.device.type == "cuda")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[torch.Tensor] = []

    def step(batch: Any) -> None:
        inputs, targets = batch
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    return model, optimizer, loader, losses, step


def ours(device: str, precision: str, backend: str = "no") -> tuple[list[float], list[str], bool]:
    """The losses of the same loop with this package, the kinds of the layers, and whether products may take fewer bits."""
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, dynamo_backend=backend)
    assert accelerator.device.type == device
    model, _, loader, losses, step = prepared(accelerator)
    for batch in loader:
        step(batch)
    layers = [type(item).__name__ for item in accelerator.unwrap_model(model, keep_torch_compile=False)]
    return [loss.item() for loss in losses], layers, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(("precision", "dtype"), [("no", None), ("bf16", torch.bfloat16)])
def test_a_training_has_the_numbers_of_one_written_by_hand(
    launched: Callable[..., Any], device: str, precision: str, dtype: torch.dtype | None
) -> None:
    ((losses, *_),) = launched(ours, device, precision, num_processes=1)
    (expected,) = launched(by_hand, device, dtype, num_processes=1)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses[-1] < losses[0]


def in_parts(device: str, precision: str, folder: str, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses of the same loop with sharded weights on all ranks, and of its end again after a load."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision=precision,
        fsdp_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(True),
    )
    _, _, loader, losses, step = prepared(accelerator)
    for number, batch in enumerate(loader):
        step(batch)
        if number + 1 == STEPS // 2:
            accelerator.save_state(folder)
    first = [accelerator.reduce(loss, "mean").item() for loss in losses]
    losses.clear()
    accelerator.load_state(folder)
    for batch in loader:
        step(batch)
    return first, [accelerator.reduce(loss, "mean").item() for loss in losses]


@pytest.mark.parametrize(
    ("precision", "dtype", "settings"),
    [
        ("no", None, {}),
        ("bf16", torch.bfloat16, {"activation_checkpointing": True}),
        ("bf16", torch.bfloat16, {"cpu_offload": True, "state_dict_type": "FULL_STATE_DICT"}),
    ],
)
def test_sharded_weights_have_the_numbers_of_a_loop_by_hand(
    launched: Callable[..., Any],
    tmp_path: Path,
    device: str,
    precision: str,
    dtype: torch.dtype | None,
    settings: dict[str, Any],
) -> None:
    found = launched(in_parts, device, precision, str(tmp_path / "checkpoint"), settings)
    (expected,) = launched(by_hand, device, dtype, num_processes=1)
    for losses, again in found:
        assert losses == pytest.approx(expected, rel=2e-2)
        assert again == pytest.approx(losses[STEPS // 2 :], rel=1e-5)


def test_fp8_trains_close_to_bf16(launched: Callable[..., Any], device: str) -> None:
    if find_spec("torchao") is None:
        pytest.skip("torchao, which multiplies 8-bit floats, is not installed here")
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} can't multiply 8-bit floats: that takes compute capability 8.9")
    ((losses, layers, _),) = launched(ours, device, "fp8", num_processes=1)
    ((expected, *_),) = launched(ours, device, "bf16", num_processes=1)
    assert layers == ["Linear", "ReLU", "Float8Linear", "ReLU", "Linear"]
    assert losses == pytest.approx(expected, rel=0.1)
    assert losses[-1] < losses[0]


def fp16_steps(device: str, fused: bool) -> list[Any]:
    """What each step of fp16 did, where the second one's gradients overflow; a fused optimizer leaves that step out by itself."""
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
    )
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
    model, optimizer, schedule = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    )
    found = []
    for size in (1.0, float("inf"), 1.0):
        before = model.weight.detach().clone()
        accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).float().sum() * size)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        is_same, rate = torch.equal(before, model.weight), schedule.get_last_lr()[0]
        found.append((optimizer.step_was_skipped, is_same, rate, accelerator.scaler.get_scale()))
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_fp16_that_overflows_is_left_out(launched: Callable[..., Any], device: str, fused: bool) -> None:
    expected = [(False, False, 0.05, 1024.0), (True, True, 0.05, 512.0), (False, False, 0.025, 512.0)]
    assert launched(fp16_steps, device, fused, num_processes=1) == [expected]


def captures(device: str) -> list[float]:
    """The sums that a captured forward gives for inputs of 0, 1 and 2, captured in steps that are measured and trained on."""
    accelerator = Accelerator(cpu=device == "cpu")
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    inputs = torch.ones(4, 8, device=accelerator.device)
    found = []
    for number in range(3):
        for _ in range(2):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
        if device == "cpu":
            found.append((model(inputs * number)).sum().item())
            continue
        graph, given = torch.cuda.CUDAGraph(), inputs.clone()
        with torch.no_grad(), torch.cuda.graph(graph):
            outputs = model(given)
        given.fill_(number)
        graph.replay()
        found.append(outputs.sum().item())
    return found


def test_a_forward_is_captured_between_steps_that_are_measured(
    launched: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # every step is measured, where usually some a second are: ranks are forked from this process
    monkeypatch.setattr(phase_timer._GpuClock, "pause", 0.0)
    how = {} if device == "cuda" else {"start_method": "fork"}
    assert launched(captures, device, num_processes=1, **how) == [[0.0, 256.0, 512.0]]


def test_a_compiled_model_has_the_numbers_of_one_that_is_not(launched: Callable[..., Any], device: str) -> None:
    # what Inductor makes are kernels of its own
    backend = "aot_eager" if device == "cpu" or is_pretended() else "inductor"
    ((losses, _, fast),) = launched(ours, device, "no", backend, num_processes=1)
    ((expected, *_),) = launched(ours, device, "no", num_processes=1)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert fast == (device == "cuda")


def by_two_on_one_device(device: str) -> list[float]:
    """The losses of the loop by DDP, with as many samples a step."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=device == "cpu", dataloader_config=DataLoaderConfiguration(split_batches=True))
    _, _, loader, losses, step = prepared(accelerator)
    for batch in loader:
        step(batch)
    return [accelerator.reduce(loss, "mean").item() for loss in losses]


def test_two_ranks_that_share_a_device_train_as_one(launched: Callable[..., Any], device: str) -> None:
    (expected,) = launched(by_hand, device, None, num_processes=1)
    for losses in run_on_ranks(by_two_on_one_device, 2, device):
        assert losses == pytest.approx(expected, rel=1e-3)


def reads_with_workers(device: str) -> list[list[float]]:
    """The sums of the batches that worker processes read, beside a device that is in use."""
    accelerator = Accelerator(cpu=device == "cpu", dataloader_config=DataLoaderConfiguration(non_blocking=True))
    held = torch.ones(8, device=accelerator.device)
    loader = DataLoader(
        TensorDataset(torch.arange(32.0)), 4, num_workers=2, pin_memory=device == "cuda", persistent_workers=True
    )
    prepared_loader = accelerator.prepare(loader)
    found = [[batch.sum().item() for (batch,) in prepared_loader] for _ in range(2)]
    assert held.sum().item() == 8
    return found


def test_a_loader_with_workers_and_locked_memory_reads_beside_a_device_in_use(
    launched: Callable[..., Any], device: str
) -> None:
    expected = [float(sum(range(first, first + 4))) for first in range(0, 32, 4)]
    assert launched(reads_with_workers, device, num_processes=1) == [[expected] * 2]


def profiles(device: str, folder: str) -> list[str]:
    """What a profile of a product names, and has the most time of."""
    handler = ProfileKwargs(activities=["cpu", "cuda"] if device == "cuda" else ["cpu"], output_trace_dir=folder)
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[handler])
    numbers = torch.ones(256, 256, device=accelerator.device)
    with accelerator.profile() as profiler:
        (numbers @ numbers).sum().item()
    kind = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    return [event.name for event in profiler.events() if event.device_type == kind]


def test_a_profile_shows_what_the_device_computed(launched: Callable[..., Any], device: str, tmp_path: Path) -> None:
    if is_pretended():
        pytest.skip("a pretended GPU runs no kernels that a profiler could see")
    (names,) = launched(profiles, device, str(tmp_path), num_processes=1)
    assert any("gemm" in name.lower() or "cutlass" in name.lower() or "aten::mm" in name for name in names), names


def trains_without_waiting(device: str) -> float:
    """A warm loop in which no operation waits for the GPU, the loader's, the step's and the clipping among them."""
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision="bf16", dataloader_config=DataLoaderConfiguration(non_blocking=True)
    )
    *_, loader, losses, step = prepared(accelerator)
    for batch in loader:
        step(batch)
    with synchronizing_is_an_error(device):
        for batch in loader:
            step(batch)
    return losses[-1].item()


def test_a_warm_training_loop_never_waits_for_the_device(launched: Callable[..., Any], device: str) -> None:
    assert all(loss < 1.5 for loss in launched(trains_without_waiting, device))


# ------------------------------------------------------------------------------------------------------------ prefetch


@pytest.mark.gpu
def test_the_next_batch_is_copied_while_the_device_computes() -> None:
    device = torch.device("cuda", 0)
    copier = SideStreamCopier(device)
    given = [(torch.full((1 << 20,), float(number)).pin_memory(), number == 3) for number in range(4)]
    batches = one_copy_ahead(given, copier)
    computing = torch.cuda.current_stream(device)
    with synchronizing_is_an_error(device):
        next(batches)
        compute_for(2, device)
        second, _ = next(batches)
        total = second.sum()
        # the third batch is on its way already, on a stream that the computation does not hold up
        until(copier.stream.query, timeout=1)
        assert not computing.query()
        rest = [batch.sum() for batch, _ in batches]
    finish(device)
    assert [total.item(), *(item.item() for item in rest)] == [float(number << 20) for number in (1, 2, 3)]
