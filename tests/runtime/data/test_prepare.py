"""A prepared loader gives each process what Hugging Face Accelerate gives it."""

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import accelerate_nb.data_loader as ours
from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.utils import DataLoaderConfiguration, set_seed
from tests.ranks import run_on_ranks
from tests.runtime.data.loaders import Numbers, plain

pytestmark = pytest.mark.filterwarnings("ignore:.*were repeated ones")
CPU = torch.device("cpu")


def test_a_loader_without_batches_keeps_its_order() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Numbers(5), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(0))

    whole = [plain(number) for number in loader()]
    assert [plain(number) for number in ours.prepare_data_loader(loader(), num_processes=1, process_index=0)] == whole
    shares = [ours.prepare_data_loader(loader(), num_processes=2, process_index=index) for index in range(2)]
    first, second = ([plain(number) for number in share] for share in shares)
    assert first == whole[0::2]
    assert second == [*whole[1::2], whole[0]]


def test_a_prepared_loader_is_a_torch_loader_with_its_settings() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples

    loader = DataLoader(Numbers(6), 2, num_workers=1, collate_fn=collate, prefetch_factor=3, persistent_workers=True)
    prepared = ours.prepare_data_loader(loader, num_processes=2, process_index=0)
    assert isinstance(prepared, DataLoader)
    for name in ("num_workers", "collate_fn", "prefetch_factor", "persistent_workers", "dataset", "timeout"):
        assert getattr(prepared, name) == getattr(loader, name)
    assert isinstance(prepared.batch_sampler, ours.BatchSamplerShard)
    assert isinstance(ours.get_sampler(prepared), SequentialSampler)
    assert (len(prepared), prepared.total_batch_size, prepared.total_dataset_length) == (2, 4, 6)


def test_dispatching_needs_a_device() -> None:
    with pytest.raises(ConfigurationError, match="requires `put_on_device=True`"):
        ours.prepare_data_loader(DataLoader(Numbers(8), 4), dispatch_batches=True)


SIZE = 19


ORDERS: dict[str, Callable[[], list[int]]] = {
    "random": lambda: random.sample(range(SIZE), SIZE),
    "numpy": lambda: np.random.permutation(SIZE).tolist(),
    "default_rng": lambda: np.random.default_rng().permutation(SIZE).tolist(),
    "torch": lambda: torch.randperm(SIZE).tolist(),
    "own generator": lambda: torch.randperm(
        SIZE, generator=torch.Generator().manual_seed(random.getrandbits(9))
    ).tolist(),
}


class Drawn(Sampler[int]):
    """An order that is drawn somewhere when an epoch begins."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __iter__(self) -> Iterator[int]:
        return iter(ORDERS[self.how]())


class DrawnOfLength(Drawn):
    """The same, with a length."""

    def __len__(self) -> int:
        return SIZE


class DrawnByNumpy(DrawnOfLength):
    """An order of numpy's generator, under the name that torch's samplers give theirs."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(SIZE).tolist())


class DrawnBatches:
    """Batches that are drawn when an epoch begins."""

    batch_size = 2

    def __iter__(self) -> Iterator[list[int]]:
        order = ORDERS["random"]()
        return iter([order[start : start + 2] for start in range(0, SIZE, 2)])

    def __len__(self) -> int:
        return SIZE // 2 + 1


class Subclassed(RandomSampler):
    """A sampler of torch's that somebody has changed."""

    def __iter__(self) -> Iterator[int]:
        return iter(ORDERS["numpy"]())


def drawn_loaders(workers: int) -> dict[str, DataLoader[Any]]:
    data = Numbers(SIZE)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    return {
        **{how: DataLoader(data, 2, sampler=DrawnOfLength(how), **options) for how in ORDERS},
        "no length": DataLoader(data, 2, sampler=Drawn("default_rng"), **options),
        "numpy's generator": DataLoader(data, 2, sampler=DrawnByNumpy(), **options),
        "batches": DataLoader(data, batch_sampler=DrawnBatches(), **options),  # type: ignore[arg-type]  # as people write them
        "subclass": DataLoader(data, 2, sampler=Subclassed(data), **options),
        "some samples": DataLoader(data, 2, sampler=SubsetRandomSampler(range(SIZE)), **options),
        "weighted": DataLoader(data, 2, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE, False), **options),
        "shuffled": DataLoader(data, 2, shuffle=True, **options),
        "seedable": DataLoader(data, 2, shuffle=True, **options),
    }


def drawn_epochs(workers: int, settings: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Two epochs of each loader, the rest of a third, and the rest of a fourth before and after it is begun anew."""
    found = {}
    for name, loader in drawn_loaders(workers).items():
        config = DataLoaderConfiguration(use_seedable_sampler=name in ("seedable", "some samples"), **settings)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        set_seed(3, device_specific=True)
        prepared = accelerator.prepare(loader)
        epochs = [[number for batch in prepared for number in batch.tolist()] for _ in range(2)]
        epochs.append([number for batch in accelerator.skip_first_batches(prepared, 1) for number in batch.tolist()])
        rest: list[int] = []
        for index, batch in enumerate(prepared):
            if index == 1:
                position = prepared.position()
            elif index > 1:
                rest += batch.tolist()
        set_seed(8, device_specific=True)
        again = accelerator.prepare(drawn_loaders(workers)[name])
        again.resume(position)
        found[name] = [*epochs, rest, [number for batch in again for number in batch.tolist()]]
    return found


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (0, {}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(0, {"even_batches": False}, marks=pytest.mark.slow),
        pytest.param(0, {"split_batches": True}, marks=pytest.mark.slow),
    ],
)
def test_each_sample_comes_once_whatever_a_sampler_draws_from(workers: int, settings: dict[str, Any]) -> None:
    first, second = run_on_ranks(drawn_epochs, 2, workers, settings)
    for name in first:
        *whole, skipped, _, _ = ([*one, *other] for one, other in zip(first[name], second[name], strict=True))
        assert [set(epoch) for epoch in whole] == [set(range(SIZE))] * 2, name
        assert whole[0] != whole[1]
        assert len(skipped) - len(set(skipped)) in (0, 1)
        assert first[name][3:] == [first[name][3]] * 2
        assert second[name][3:] == [second[name][3]] * 2


class Endless(Sampler[int]):
    """Indices without an end."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(SIZE)


def refused(sampler: Sampler[int] | None) -> str:
    accelerator = Accelerator(cpu=True)
    random.seed(accelerator.process_index)
    sampler = DistributedSampler(Numbers(SIZE)) if sampler is None else sampler
    with pytest.raises(ConfigurationError) as caught:
        next(iter(accelerator.prepare(DataLoader(Numbers(SIZE), 2, sampler=sampler))))
    return str(caught.value)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [(Endless(), "Endless gives rank 1 other samples .* does not end"), (None, "DistributedSampler .* deals them out")],
)
def test_an_order_that_can_not_be_sent_to_all_names_the_sampler_and_the_rank(sampler: Any, message: str) -> None:
    for found in run_on_ranks(refused, 2, sampler):
        assert re.search(message, found)
