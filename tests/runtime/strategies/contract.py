"""The training that every strategy has to end with the same weights: the loop, and the strategies that run it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import DDP, Accelerator, GradScalerKwargs, ParallelismConfig, Strategy
from accelerate_nb.utils import FullyShardedDataParallelPlugin, TorchTensorParallelConfig

SAMPLES, BATCH, ACCUMULATION, MOST = 48, 8, 2, 0.5
# What the order of additions may change, by precision. Gradients in float16 are right to 2 ** -11 of themselves, and are clipped: the
# four steps that are made differ by 3e-5, and other machines may round otherwise.
ROUNDING = {"no": 1e-6, "fp16": 3e-4}
# AdamW divides by the root of a mean of squares, which makes the rounding of small gradients larger.
ADAMW_ROUNDING = 1e-4
# Two epochs; it is saved inside of one, and of a window of accumulation.
MICRO_STEPS, SAVED_AFTER = 12, 3
# The factor of the loss in float16 grows after each step, and leaves room for gradients of a part of the batch, which are larger.
SCALING = {"init_scale": 2.0**10, "growth_interval": 1}
# The gradient that overflows in float16: by a sample of the first rank's, at the end of the last micro-step before it is saved, and
# of a unit whose weights are the last rank's where weights are sharded.
OVERFLOWING_SAMPLE, OVERFLOWING_UNIT = 17, -1
# The steps after these micro-steps are left out for it, in either epoch.
OVERFLOWS = [4, 10]
_PAGE = Path(__file__).parents[3] / "docs" / "custom_strategy.md"
Weights = list[list[float]]
Refused = Mapping[str, tuple[Callable[[], None], type[Exception], str]]
Arguments = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Deletion:
    """A strategy without one of its reductions, by its arguments of `Accelerator`; `precision` is where that matters."""

    reduction: str
    arguments: Arguments
    precision: str = "no"


@dataclass(frozen=True)
class StrategyCase:
    """A strategy by its arguments of `Accelerator`, on so many ranks, and without each of its reductions."""

    name: str
    ranks: int
    arguments: Arguments = dict
    deletions: Sequence[Deletion] = ()

    def __post_init__(self) -> None:
        assert self.deletions or self.ranks == 1, f"{self.name} names no reduction that can be deleted"


@dataclass(frozen=True)
class Outcome:
    """The end of a training on a rank: weights, the micro-steps whose step was left out, the factor of the loss."""

    weights: Weights
    skipped: Sequence[int]
    scale: float


def documented_strategy(changes: Mapping[str, str] | None = None) -> type[Strategy]:
    """The class that the documentation shows, with lines of it changed."""
    namespace: dict[str, Any] = {}
    found = re.search(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    source = found[1]
    assert source.count("\n") <= 40
    for line, other in (changes or {}).items():
        assert source.count(line) == 1
        source = source.replace(line, other)
    exec(source, namespace)  # the page's own code is what is tested
    strategy: type[Strategy] = namespace["OneMessage"]
    return strategy


def of_documentation() -> dict[str, Any]:
    return {"strategy": documented_strategy()}


def of_documentation_without_sum() -> dict[str, Any]:
    # each rank's own message counts for all ranks, so that nothing changes but what it is the mean of
    return {"strategy": documented_strategy({"dist.all_reduce(message)": "message *= self.world.size"})}


def by_mesh(**degrees: Any) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(**degrees)}


def sharded(strategy: str | None = None, **settings: Any) -> dict[str, Any]:
    """FSDP by its plugin; `strategy` is a class below it."""
    if strategy is None:
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **settings)}
    from tests.runtime.strategies import fsdp_without_reductions

    return {"strategy": getattr(fsdp_without_reductions, strategy)}


class DDPWithoutMean(DDP):
    """Copies whose gradients stay each rank's own."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap_model(model)
        wrapped.register_comm_hook(None, _own_gradients)
        return wrapped


def _own_gradients(_state, bucket):  # DDP takes no annotation that is a string
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def without_mean(**degrees: int) -> dict[str, Any]:
    return {"strategy": DDPWithoutMean, **(by_mesh(**degrees) if degrees else {})}


MEAN = "the mean of gradients"
DDP_DELETIONS = (Deletion(MEAN, without_mean),)


def split(*, with_sum: bool = True, **degrees: int) -> dict[str, Any]:
    """Layers split along their width, the outputs of the second one being summed up."""
    from tests.runtime.strategies.without_sum import RowwiseWithoutSum

    plan = {"0": "colwise", "2": "rowwise" if with_sum else RowwiseWithoutSum()}
    return by_mesh(tp_handler=TorchTensorParallelConfig(plan=plan), **degrees)


def pipeline(strategy: str | None = None, **degrees: Any) -> dict[str, Any]:
    """Two stages; `strategy` is a class below that of pipelines."""
    found = by_mesh(pp_size=2, **degrees)
    if strategy is None:
        return found
    from tests.runtime.strategies import pipeline_without_reductions

    return {**found, "strategy": getattr(pipeline_without_reductions, strategy)}


FSDP_DELETIONS = (
    Deletion(MEAN, partial(sharded, "WithoutReduceScatter")),
    Deletion("the norm at clipping", partial(sharded, "WithoutNorm")),
    Deletion("the overflow", partial(sharded, "WithoutOverflow"), "fp16"),
)
MEMORY: dict[str, Any] = {
    "cpu_offload": True,
    "activation_checkpointing": True,
    "auto_wrap_policy": "SIZE_BASED_WRAP",
    "min_num_params": 20,
}


def of_shards_and_copies(strategy: str) -> dict[str, Any]:
    return sharded(strategy) | by_mesh(dp_replicate_size=2, dp_shard_size=2)


# A new strategy enters by one line, with a deletion of each of its reductions; `make test-all` runs those on four ranks.
CASES: Sequence[StrategyCase] = (
    StrategyCase("one process", 1),
    StrategyCase("DDP", 2, deletions=DDP_DELETIONS),
    StrategyCase(
        "DDP by a mesh",
        2,
        partial(by_mesh, dp_replicate_size=2),
        (Deletion(MEAN, partial(without_mean, dp_replicate_size=2)),),
    ),
    StrategyCase("the documentation's", 2, of_documentation, (Deletion(MEAN, of_documentation_without_sum),)),
    StrategyCase("FSDP", 2, sharded, FSDP_DELETIONS),
    StrategyCase(
        "FSDP with complete files", 2, partial(sharded, state_dict_type="FULL_STATE_DICT"), FSDP_DELETIONS[:1]
    ),
    StrategyCase("FSDP on one process", 1, partial(dict, strategy="fsdp")),
    StrategyCase("FSDP that saves memory", 2, partial(sharded, **MEMORY), FSDP_DELETIONS[:1]),
    StrategyCase(
        "split layers",
        2,
        partial(split, tp_size=2),
        (Deletion("the sum of outputs", partial(split, with_sum=False, tp_size=2)),),
    ),
    StrategyCase(
        "pipeline",
        2,
        pipeline,
        (
            Deletion("the gradients of the next stage", partial(pipeline, "WithoutGradients")),
            Deletion("the norm at clipping", partial(pipeline, "WithoutNorm")),
            Deletion("the overflow", partial(pipeline, "WithoutOverflow"), "fp16"),
        ),
    ),
    StrategyCase("DDP on 4", 4, deletions=DDP_DELETIONS),
    StrategyCase("FSDP on 4", 4, partial(dict, strategy="fsdp"), FSDP_DELETIONS),
    StrategyCase(
        "FSDP of split layers",
        4,
        partial(split, dp_shard_size=2, tp_size=2),
        (Deletion("the sum of outputs", partial(split, with_sum=False, dp_shard_size=2, tp_size=2)),),
    ),
    StrategyCase(
        "pipelines of shards",
        4,
        partial(pipeline, dp_shard_size=2),
        (
            Deletion(MEAN, partial(pipeline, "WithoutMean", dp_shard_size=2)),
            Deletion("the norm at clipping", partial(pipeline, "WithoutNorm", dp_shard_size=2)),
        ),
    ),
    StrategyCase(
        "copies of pipelines",
        4,
        partial(pipeline, dp_replicate_size=2),
        (Deletion("the norm at clipping", partial(pipeline, "WithoutNorm", dp_replicate_size=2)),),
    ),
    StrategyCase(
        "HSDP on 4",
        4,
        partial(by_mesh, dp_replicate_size=2, dp_shard_size=2),
        (
            Deletion(MEAN, partial(of_shards_and_copies, "WithoutReduceScatter")),
            Deletion("the mean over copies", partial(of_shards_and_copies, "WithoutAllReduce")),
            Deletion("the norm at clipping", partial(of_shards_and_copies, "WithoutNorm")),
        ),
    ),
)


def parameters_of(case: StrategyCase, *deletions: Deletion) -> Any:
    """Those of a test, which is slow on more than two ranks."""
    name = " without ".join([case.name, *(deletion.reduction for deletion in deletions)])
    return pytest.param(case, *deletions, id=name, marks=pytest.mark.slow if case.ranks > 2 else ())


def net(overflows: bool = False) -> nn.Module:
    """A network with a weight that does not learn; its numbers are equal also where several threads make one."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    model[0].bias.requires_grad_(False)
    if overflows:
        overflow = _Overflow()
        model.register_forward_pre_hook(overflow.look_at_samples)
        model[1].register_forward_pre_hook(overflow.add_factor)
    return model


class _Overflow:
    """The same values, of which the gradient of one unit for one sample is far beyond float16; of a split layer, one of each part."""

    def look_at_samples(self, _model: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self._samples = (inputs[0] == 1).all(1)

    def add_factor(self, _layer: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        (hidden,) = inputs
        factors = torch.zeros_like(hidden, dtype=torch.float32)
        factors[:, OVERFLOWING_UNIT] = 1e9 * self._samples
        return hidden + factors * (hidden - hidden.detach())


def parts(
    precision: str, adamw: bool = False, rebuilt: Callable[[nn.Module], nn.Module] = lambda model: model
) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    """The objects of the training, equal at every call."""
    model = rebuilt(net(overflows=precision == "fp16"))
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(learning, lr=0.2, momentum=0.9)
    if adamw:
        optimizer = torch.optim.AdamW(learning, lr=0.05)
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    inputs[OVERFLOWING_SAMPLE] = 1
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), loader


def by_hand(precision: str = "no", adamw: bool = False) -> Outcome:
    """The same training with nothing but PyTorch, in one process."""
    model, optimizer, schedule, loader = parts(precision, adamw)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", **SCALING)
    skipped = []
    for number, (batch, targets) in enumerate(islice(_endless(loader), MICRO_STEPS), 1):
        with torch.autocast("cpu", dtype=torch.float16, enabled=precision == "fp16"):
            outputs = model(batch)
        scaler.scale(nn.functional.mse_loss(outputs.float(), targets) / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), MOST)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() < scale:
                skipped.append(number)
            else:
                schedule.step()
            optimizer.zero_grad()
    return Outcome(_flat(model.state_dict()), skipped, scaler.get_scale())


def trained(
    folder: str,
    arguments: Arguments,
    precision: str = "no",
    adamw: bool = False,
    saved_after: int = SAVED_AFTER,
    rebuilt: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Outcome:
    """
    The outcome of the training on this rank: in its middle it is saved, and goes on with objects that are made anew.

    The batch of all ranks together is the same on any number of them. `rebuilt` makes the network of layers of a package's own.
    """
    before = train(folder, arguments, saved_after, False, precision, adamw, rebuilt)
    after = train(folder, arguments, MICRO_STEPS - saved_after, True, precision, adamw, rebuilt)
    skipped = [*before.skipped, *(saved_after + number for number in after.skipped)]
    return Outcome(after.weights, skipped, after.scale)


def train(
    folder: str,
    arguments: Arguments,
    count: int,
    resumes: bool = False,
    precision: str = "no",
    adamw: bool = False,
    rebuilt: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Outcome:
    """So many micro-steps from the beginning, with a checkpoint at their end, or from such a checkpoint on."""
    options = {"cpu": True, "mixed_precision": precision, "kwargs_handlers": [], **arguments()}
    if precision == "fp16":
        options["kwargs_handlers"] = [*options["kwargs_handlers"], GradScalerKwargs(**SCALING)]
    accelerator = Accelerator(split_batches=True, gradient_accumulation_steps=ACCUMULATION, **options)
    model, optimizer, schedule, loader = parts(precision, adamw, rebuilt)
    # objects may come in any order
    optimizer, loader, model, schedule = accelerator.prepare(optimizer, loader, model, schedule)
    if resumes:
        accelerator.load_state(folder)
    skipped = []
    for number, (batch, targets) in enumerate(islice(_endless(loader), count), 1):
        with accelerator.accumulate(model):
            if accelerator.parallelism_config is not None and accelerator.parallelism_config.pp_enabled:
                accelerator.train_step(model, batch, loss_fn=nn.functional.mse_loss, targets=targets)
            else:
                accelerator.backward(nn.functional.mse_loss(model(batch), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MOST)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and optimizer.step_was_skipped:
            skipped.append(number)
        if number == count and not resumes:
            # while the loader is read: it goes on from here
            accelerator.save_state(folder)
    scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    # complete weights are the main process's where others have parts
    outcome = Outcome(_flat(accelerator.get_state_dict(model)), skipped, scale)
    accelerator.end_training()
    return outcome


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _flat(state: Mapping[str, torch.Tensor]) -> Weights:
    return [tensor.cpu().flatten().tolist() for tensor in state.values()]


def check_refused(cases: Refused) -> None:
    """What is refused, by the errors and their texts, leaves nothing behind."""
    for call, error, message in cases.values():
        with pytest.raises(error, match=message):
            call()
        Accelerator(cpu=True).end_training()


def difference(found: Sequence[Outcome], precision: str = "no", adamw: bool = False) -> float:
    """The largest difference of any weight on any rank from one process by hand."""
    wanted = by_hand(precision, adamw).weights
    return max(
        (torch.tensor(weight) - torch.tensor(other)).abs().max().item()
        for outcome in found
        if outcome.weights or outcome is found[0]
        for weight, other in zip(outcome.weights, wanted, strict=True)
    )
