"""The worker's part of the self-test: it tries each thing that training needs, and compares with the expected result."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb.errors import StateError
from accelerate_nb.events.event_types import CheckResult, CheckState
from accelerate_nb.rank.event_sink import outlet
from accelerate_nb.runtime.accelerator.accelerator import Accelerator
from accelerate_nb.runtime.compat.dataclasses import GradScalerKwargs

T = TypeVar("T")

_SAMPLES = 23  # a number that no number of processes divides
_STEPS = 4
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The devices whose name is the same in several processes.
_NAMED_ALIKE = {"cpu", "xla"}
# How far losses may differ where sums are rounded differently.
_TOLERANCES = {"no": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


class SelfTestStep(NamedTuple):
    """One thing to try; `try_it` returns what was found, and raises where that is wrong."""

    name: str
    title: str
    try_it: Callable[[Accelerator], str]


def run_checks() -> None:
    """Try everything on this rank, in the same order as on all others; rank 0 reports the progress."""
    for step in STEPS:
        _report(step, "waiting")
    # a scale at which a small model does not overflow: a step that is left out would change what comes out
    accelerator = Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    for step in STEPS:
        _report(step, "running")
        found = step.try_it(accelerator)
        # only when all have got this far has it worked
        accelerator.wait_for_everyone()
        _report(step, "passed", found)


def _report(step: SelfTestStep, state: CheckState, text: str = "") -> None:
    listener = outlet()
    if listener is not None and listener.rank == 0:
        listener.send(CheckResult(step.name, step.title, state, text).display(rank=0))


def devices(accelerator: Accelerator) -> str:
    """Each process computes on a device of its own, and right."""
    device = accelerator.device
    numbers = torch.arange(16.0).view(4, 4)
    _expect("a matrix product", (numbers.to(device) @ numbers.to(device)).cpu(), numbers @ numbers, str(device))
    found = _from_all(accelerator, str(device))
    if device.type not in _NAMED_ALIKE and len(set(found)) < len(found):
        raise StateError(
            f"Each process should have a device of its own, but they have {', '.join(found)}. "
            "Start fewer processes, or see what CUDA_VISIBLE_DEVICES hides."
        )
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{_processes(accelerator)} on the CPU, {threads} thread{'s' if threads > 1 else ''} each"
    return ", ".join(found)


def group(accelerator: Accelerator) -> str:
    """The processes know each other."""
    if accelerator.num_processes == 1:
        return "one process alone: no group is needed"
    ranks = _from_all(accelerator, accelerator.process_index)
    if ranks != list(range(accelerator.num_processes)):
        raise StateError(
            f"The group should have ranks 0 to {accelerator.num_processes - 1} in order, but has {ranks}. "
            "See whether RANK or WORLD_SIZE is set in the notebook's own environment, and remove it."
        )
    return f"{_processes(accelerator)} talk through {accelerator.state.backend}"


def collectives(accelerator: Accelerator) -> str:
    """Exchanged tensors arrive whole and in order."""
    size, rank = accelerator.num_processes, accelerator.process_index
    # made here and sent there: XLA computes one program for all ranks, in which no rank's own number stands
    local = torch.full((3,), float(rank + 1)).to(accelerator.device)
    expected = torch.arange(1.0, size + 1)
    total, mean = accelerator.reduce(local.clone()), accelerator.reduce(local.clone(), "mean")
    gathered = accelerator.gather(local)
    # XLA computes once each rank has queued the same work, and then a value can be read on one rank alone
    accelerator.wait_for_everyone()
    _expect("reduce(sum)", total.cpu(), expected.sum().expand(3))
    _expect("reduce(mean)", mean.cpu(), expected.mean().expand(3))
    _expect("gather", gathered.cpu(), expected.repeat_interleave(3))
    return "sums, means and gathered tensors are right"


def loader(accelerator: Accelerator) -> str:
    """A prepared loader gives each sample to one process."""
    batches = accelerator.prepare(DataLoader(TensorDataset(torch.arange(_SAMPLES)), batch_size=4))
    gathered = [accelerator.gather_for_metrics(batch) for (batch,) in batches]
    accelerator.wait_for_everyone()
    seen = [number for batch in gathered for number in batch.tolist()]
    if sorted(seen) != list(range(_SAMPLES)):
        raise StateError(
            f"Each of {_SAMPLES} samples should come once, but these came: {sorted(seen)}. "
            "Please report this, with the versions of torch and accelerate_nb."
        )
    return f"each of {_SAMPLES} samples came once, on {_processes(accelerator)}"


def precision(accelerator: Accelerator) -> str:
    """Operations compute in the requested precision."""
    requested = str(accelerator.mixed_precision)
    numbers = torch.linspace(-1.0, 1.0, 64, device=accelerator.device).view(8, 8)
    with accelerator.autocast():
        product = numbers @ numbers
    expected = _DTYPES.get(requested)
    if (expected is not None and product.dtype != expected) or not product.isfinite().all():
        raise StateError(
            f"mixed_precision={requested!r} should compute in {expected}, but gave {product.dtype}"
            f"{'' if product.isfinite().all() else ' with numbers that are not finite'}. Use mixed_precision='no'."
        )
    return f"{'full precision' if requested == 'no' else requested}: matrix products in {str(product.dtype).removeprefix('torch.')}"


def training(accelerator: Accelerator) -> str:
    """A short training has the losses of the same training in one process."""
    micro_steps = accelerator.gradient_accumulation_steps
    batch = 4
    together = batch * accelerator.num_processes * micro_steps
    inputs = torch.randn(together * _STEPS, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(dim=1, keepdim=True).sin()
    expected_losses = _alone(accelerator, inputs, targets, together)
    model, optimizer = _model(torch.device("cpu"))
    model, optimizer, batches = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(inputs, targets), batch_size=batch)
    )
    found = []
    for batch_inputs, batch_targets in batches:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(batch_inputs), batch_targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean"))
    accelerator.wait_for_everyone()
    losses = [float(loss) for loss in found]
    spread = [sum(losses[i : i + micro_steps]) / micro_steps for i in range(0, len(losses), micro_steps)]
    tolerance = _TOLERANCES.get(str(accelerator.mixed_precision), 5e-2)
    difference = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(spread, expected_losses, strict=True))
    if difference > tolerance:
        here, alone = (", ".join(f"{loss:.4f}" for loss in losses) for losses in (spread, expected_losses))
        raise StateError(
            f"The losses should be those of one process to {tolerance:g}, but {here} stand against {alone}. "
            "Try mixed_precision='no' and one process to find what makes the difference."
        )
    if accelerator.num_processes == 1:
        return f"loss from {spread[0]:.3f} to {spread[-1]:.3f} in {len(spread)} steps"
    return f"{len(spread)} losses on {_processes(accelerator)} are those of one process (apart by {difference:.0e})"


STEPS = (
    SelfTestStep("devices", "Devices", devices),
    SelfTestStep("group", "Process group", group),
    SelfTestStep("collectives", "All-reduce, gather", collectives),
    SelfTestStep("loader", "A split data loader", loader),
    SelfTestStep("precision", "Mixed precision", precision),
    SelfTestStep("training", "A short training", training),
)


def _model(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same small model on every process, and what trains it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    # not torch's own generator, which the person's training goes on with
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter.data, -0.35, 0.35, generator=draw)
    model.to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _alone(accelerator: Accelerator, inputs: Tensor, targets: Tensor, batch: int) -> list[float]:
    """The losses of the training in this process alone, each step on all that the processes take together."""
    model, optimizer = _model(accelerator.device)
    losses = []
    for batch_inputs, batch_targets in zip(inputs.split(batch), targets.split(batch), strict=True):
        with accelerator.autocast():
            outputs = model(batch_inputs.to(accelerator.device))
        loss = F.mse_loss(outputs.float(), batch_targets.to(accelerator.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _expect(operation: str, found: Tensor, expected: Tensor, location: str = "this rank") -> None:
    if not torch.allclose(found, expected):
        raise StateError(
            f"{operation} should give {expected.tolist()}, but gave {found.tolist()} on {location}. "
            "Restart the kernel; if it stays so, run with cpu=True to see whether the device or its driver is at fault."
        )


def _from_all(accelerator: Accelerator, value: T) -> list[T]:
    return list(accelerator.gather_for_metrics([value], use_gather_object=True))


def _processes(accelerator: Accelerator) -> str:
    return f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
