"""Processes with parts of the same sequences train as one process with all of them."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accelerate_nb import Accelerator, ConfigurationError, ParallelismConfig
from accelerate_nb.errors import DataError
from accelerate_nb.runtime.strategies.context_parallel import Ring
from accelerate_nb.transport.serializer import dump_homeward, load
from accelerate_nb.utils import TorchContextParallelConfig, TorchDynamoPlugin
from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import DDPWithoutMean, Refused, check_refused
from tests.runtime.strategies.tiny_llama import llama

LENGTH, ACCUMULATION = 16, 2


class Model(nn.Module):
    """A transformer of one block, whose attention a test can replace."""

    def __init__(self, heads: int = 4, attend: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 16), nn.Embedding(LENGTH, 16)
        self.keys, self.mixed, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 11)
        self.heads, self.attend = heads, attend

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        parts = [part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.keys(hidden).chunk(3, 2)]
        attended = (self.attend or _causal)(*parts)
        logits: torch.Tensor = self.head(hidden + self.mixed(attended.transpose(1, 2).flatten(2)))
        return logits


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    tokens = torch.randint(0, 11, (24, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(24, -1)
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:], positions), batch_size=4)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), loader


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, targets, positions = batch
    return F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten())


Numbers = dict[str, Any]


def by_hand() -> Numbers:
    model, optimizer, schedule, loader = parts()
    norms = []
    for number, batch in enumerate(loader, 1):
        (loss_of(model, batch) / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return {"weights": {name: weight.tolist() for name, weight in model.state_dict().items()}, "norms": norms}


def along(**degrees: Any) -> dict[str, Any]:
    handler = TorchContextParallelConfig(
        **{name: degrees.pop(name) for name in ("attention", "cp_comm_strategy", "cuts_batches") if name in degrees}
    )
    strategy = {"strategy": degrees.pop("strategy")} if "strategy" in degrees else {}
    return {"parallelism_config": ParallelismConfig(cp_handler=handler, **degrees), **strategy}


def trained(arguments: Callable[[], dict[str, Any]], folder: str, count: int = 6, resumes: bool = False) -> Numbers:
    accelerator = Accelerator(cpu=True, split_batches=True, gradient_accumulation_steps=ACCUMULATION, **arguments())
    model, optimizer, schedule, loader = accelerator.prepare(*parts())
    if resumes:
        accelerator.load_state(folder)
    norms, shapes = [], set()
    for number, batch in enumerate(loader, 1):
        shapes.add(tuple(batch[0].shape))
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number == count:
            if not resumes:
                accelerator.save_state(folder)
            break
    state = accelerator.get_state_dict(model)
    found = {
        "weights": {name: weight.tolist() for name, weight in state.items()},
        "norms": norms,
        "shapes": shapes,
        "rank": accelerator.context_parallel_rank if accelerator.parallelism_config else 0,
    }
    accelerator.end_training()
    # the function is torch's own again
    assert F.scaled_dot_product_attention is scaled_dot_product_attention
    return found


def check_numbers(found: list[Numbers]) -> None:
    wanted = by_hand()
    for name, weight in found[0]["weights"].items():
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(wanted["weights"][name]), rtol=0, atol=1e-6)
    for item in found:
        assert item["norms"] == pytest.approx(wanted["norms"], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "arguments", "shape"),
    [
        (2, partial(along, cp_size=2), (4, 8)),
        (2, partial(along, cp_size=2, attention="heads"), (4, 8)),
        pytest.param(2, partial(along, cp_size=2, cp_comm_strategy="alltoall"), (4, 8), marks=pytest.mark.slow),
        pytest.param(2, partial(along, cp_size=2, strategy="fsdp"), (4, 8), marks=pytest.mark.slow),
        pytest.param(4, partial(along, cp_size=4, cp_comm_strategy="alltoall"), (4, 4), marks=pytest.mark.slow),
        pytest.param(4, partial(along, cp_size=2, dp_shard_size=2), (2, 8), marks=pytest.mark.slow),
        pytest.param(4, partial(along, cp_size=2, dp_shard_size=2, attention="heads"), (2, 8), marks=pytest.mark.slow),
    ],
    ids=["ring", "heads", "ring of messages", "shards", "ring of 4", "shards of 2 x 2", "shards of 2 x 2, heads"],
)
def test_a_training_ends_in_the_weights_of_one_process(
    ranks: int, arguments: Callable[[], dict[str, Any]], shape: tuple[int, int], tmp_path: Path
) -> None:
    found = run_on_ranks(trained, ranks, arguments, str(tmp_path / "checkpoint"))
    check_numbers(found)
    assert {shape} == set().union(*(item["shapes"] for item in found))
    assert [item["rank"] for item in found] == [rank % (LENGTH // shape[1]) for rank in range(ranks)]


def saved_in_the_middle(arguments: Callable[[], dict[str, Any]], folder: str) -> Numbers:
    first = trained(arguments, folder, 2)
    rest = trained(arguments, folder, 4, resumes=True)
    return {**rest, "norms": first["norms"] + rest["norms"]}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [partial(along, cp_size=2), partial(along, cp_size=2, strategy="fsdp")])
def test_a_training_that_is_saved_in_its_middle_goes_on(
    arguments: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    check_numbers(run_on_ranks(saved_in_the_middle, 2, arguments, str(tmp_path / "checkpoint")))


@pytest.mark.slow
def test_one_process_goes_on_with_a_checkpoint_of_parts_and_the_other_way_round(tmp_path: Path) -> None:
    folder, parts_of = str(tmp_path / "checkpoint"), partial(along, cp_size=2)
    first = run_on_ranks(trained, 2, parts_of, folder, 2)[0]
    rest = run_on_ranks(trained, 1, dict, folder, 4, True)[0]
    check_numbers([{**rest, "norms": first["norms"] + rest["norms"]}])
    first = run_on_ranks(trained, 1, dict, folder + "2", 2)[0]
    found = run_on_ranks(trained, 2, parts_of, folder + "2", 4, True)
    check_numbers([{**item, "norms": first["norms"] + item["norms"]} for item in found])


class OwnKeys(Ring):
    """A ring in which nobody's keys arrive."""

    def blocks(self, keys: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        yield from ((source, keys) for source, _ in super().blocks(keys))


class OwnGradients(Ring):
    """A ring in which nobody's gradients of keys arrive."""

    def to_owners(self, gradients: Any) -> torch.Tensor:
        own: torch.Tensor = gradients[self.rank]
        return own


def without_mean() -> dict[str, Any]:
    return {**along(cp_size=2), "strategy": DDPWithoutMean}


def trained_with(ring: type[Ring], folder: str) -> Numbers:
    from accelerate_nb.runtime.strategies import context_parallel

    context_parallel.Ring = ring  # type: ignore[misc]
    return trained(without_mean if ring is Ring else partial(along, cp_size=2), folder)


@pytest.mark.parametrize(
    "ring", [OwnKeys, *(pytest.param(ring, marks=pytest.mark.slow) for ring in (OwnGradients, Ring))]
)
def test_without_an_exchange_it_ends_in_other_weights(ring: type[Ring], tmp_path: Path) -> None:
    found = run_on_ranks(trained_with, 2, ring, str(tmp_path / "checkpoint"))[0]
    wanted = by_hand()["weights"]
    differences = [
        (torch.tensor(weight) - torch.tensor(wanted[name])).abs().max().item()
        for name, weight in found["weights"].items()
    ]
    assert max(differences) > 1e-4


# transformers


class Texts(Dataset[Any]):
    """Tokens, with labels that are left out: more of them in the first half, so that parts have unequal numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: 1 + index % 4] = -100
        return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones(8, dtype=torch.long)}


def llama_trained(arguments: Callable[[], dict[str, Any]], recomputes: bool) -> Numbers:
    accelerator = Accelerator(cpu=True, split_batches=True, **arguments())
    model = llama(tied=True)
    if recomputes:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Texts(), batch_size=2))
    losses, norms = [], []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {"losses": losses, "norms": norms, "weights": {name: value.tolist() for name, value in state.items()}}


def compiled() -> dict[str, Any]:
    return {**along(cp_size=2), "dynamo_plugin": TorchDynamoPlugin(backend="eager")}


@pytest.mark.parametrize(
    ("ranks", "arguments", "recomputes"),
    [
        (2, partial(along, cp_size=2), True),
        pytest.param(2, partial(along, cp_size=2, attention="heads"), False, marks=pytest.mark.slow),
        pytest.param(2, compiled, False, marks=pytest.mark.slow),
        pytest.param(2, partial(along, cp_size=2, strategy="fsdp"), True, marks=pytest.mark.slow),
    ],
    ids=["ring, recomputing", "heads", "compiled", "shards, recomputing"],
)
def test_a_model_of_transformers_has_the_numbers_of_one_process(
    ranks: int, arguments: Callable[[], dict[str, Any]], recomputes: bool
) -> None:
    pytest.importorskip("transformers")
    (wanted,) = run_on_ranks(llama_trained, 1, dict, False)
    found = run_on_ranks(llama_trained, ranks, arguments, recomputes)
    for item in found:
        assert item["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert item["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    for name, weight in found[0]["weights"].items():
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(wanted["weights"][name]), rtol=0, atol=1e-6)


# Accelerate's block


def interrupted(*_: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def in_a_block() -> None:
    accelerator = Accelerator(cpu=True, **along(cp_size=2))
    rank = accelerator.context_parallel_rank
    model = accelerator.prepare(Model().requires_grad_(False))
    tokens, positions = torch.arange(8)[None] % 11, torch.arange(8)[None]
    with accelerator.maybe_context_parallel(
        buffers=[tokens, positions], buffer_seq_dims=[1, 1], no_restore_buffers={tokens}
    ):
        wanted = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert tokens.tolist() == positions.tolist() == [wanted]
        found, copied = model(tokens, positions), deepcopy(model)
        assert found.shape == (1, 4, 11)
        # a copy, as for a mean of weights, attends alike with weights of its own
        assert torch.equal(copied(tokens, positions), found)
        nn.init.zeros_(copied.tokens.weight)
        assert not torch.equal(copied(tokens, positions), found)
    # in the notebook it attends by itself
    assert "forward" not in vars(load(dump_homeward(copied)))
    assert (tokens.tolist(), positions.tolist()) == ([wanted], [list(range(8))])
    # after an interrupted forward other models attend as before
    inputs = torch.rand(1, 4, 8, 4)
    with pytest.raises(KeyboardInterrupt):
        accelerator.prepare(Model(4, interrupted).requires_grad_(False))(tokens, positions[:, :4])
    assert torch.equal(_causal(inputs, inputs, inputs)[:, :, :1], inputs[:, :, :1])
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(16).view(2, 8)), batch_size=1))
    (batch,) = next(iter(loader))
    # what a prepared loader has cut stays as it is
    with accelerator.maybe_context_parallel(buffers=[batch], buffer_seq_dims=[1]):
        assert batch.tolist() == [wanted]


def uncut() -> list[Any]:
    accelerator = Accelerator(cpu=True, **along(cp_size=2, cuts_batches=False))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(16).view(2, 8)), batch_size=1))
    return [batch.tolist() for (batch,) in loader]


def test_a_block_cuts_buffers_as_accelerate_does_and_without_parts_changes_nothing() -> None:
    run_on_ranks(in_a_block, 2)
    assert run_on_ranks(uncut, 2) == [[[[*range(8)]], [[*range(8, 16)]]]] * 2
    accelerator = Accelerator(cpu=True)
    tokens = torch.arange(8)
    with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[0]):
        assert tokens.shape == (8,)


# Bad input


def attend_with(attend: Callable[..., torch.Tensor], heads: int = 4, **settings: Any) -> None:
    accelerator = Accelerator(cpu=True, **along(cp_size=2, **settings))
    model = accelerator.prepare(Model(heads, attend))
    model(torch.zeros(1, 8, dtype=torch.long), torch.arange(8)[None])


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=torch.ones(8, 8, dtype=torch.bool))


def dropping(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)


def imported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def written(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (query @ key.mT).softmax(-1) @ value


def read(batch: Any, **settings: Any) -> None:
    accelerator = Accelerator(cpu=True, **along(cp_size=2, **settings))
    next(iter(accelerator.prepare(DataLoader([batch], batch_size=None))))


def other_labels() -> None:
    accelerator = Accelerator(cpu=True, **along(cp_size=2))
    model = accelerator.prepare(llama())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=tokens, labels=tokens)


def eager() -> None:
    accelerator = Accelerator(cpu=True, **along(cp_size=2))
    model = llama()
    model.config._attn_implementation = "eager"
    accelerator.prepare(model)


class Reader(nn.LSTM):
    """Somebody's own."""


def recurrent(*layers: nn.Module) -> None:
    accelerator = Accelerator(cpu=True, **along(cp_size=2))
    model = Model(4, _causal)
    model.before = nn.ModuleList(layers)
    accelerator.prepare(model)


LEFT = {"input_ids": torch.zeros(1, 8), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])}
REFUSED: Refused = {
    "mask": (partial(attend_with, masked), ConfigurationError, r"attends with a mask of shape \(8, 8\)"),
    "dropout": (partial(attend_with, dropping), ConfigurationError, "leaves out 10% of its weights"),
    "imported": (partial(attend_with, imported), ConfigurationError, "that was imported by this name"),
    "written": (partial(attend_with, written), ConfigurationError, "never called torch.nn.functional"),
    "heads": (
        partial(attend_with, _causal, heads=1, attention="heads"),
        ConfigurationError,
        "along cp=2, but it does not divide the 1 heads of queries",
    ),
    "length": (partial(read, torch.zeros(1, 6)), DataError, "length 6 should be cut in 4 equal pieces for 2 processes"),
    "padding": (partial(read, LEFT), DataError, "hides tokens before others that it shows"),
    "labels": (other_labels, DataError, r"Pass batch\['labels'\], or shift_labels"),
    "recurrent": (
        partial(recurrent, nn.RNN(4, 4), nn.GRUCell(4, 4), Reader(4, 4)),
        ConfigurationError,
        r"cp_size=2 was requested for Model, .* layers: RNN \(before.0\), GRUCell \(before.1\), Reader \(before.2\)",
    ),
    "eager": (eager, ConfigurationError, "attends by 'eager'. Load it with attn_implementation='sdpa'"),
}


def test_what_parts_can_not_do_is_refused_on_all_processes() -> None:
    pytest.importorskip("transformers")
    run_on_ranks(check_refused, 2, REFUSED)
