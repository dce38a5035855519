"""Batches of every kind reach each process whole, its own part of them, however they are dealt out."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_nb.errors import DataError
from accelerate_nb.runtime.data.dispatcher import cut, joined, size_of
from accelerate_nb.runtime.operations.nested import placed
from tests.ranks import run_on_ranks
from tests.runtime.data.loaders import Numbers, typed

Pair = namedtuple("Pair", ["numbers", "names"])


@dataclass(frozen=True)
class Record:
    """A batch as a data class that checks nothing and can't be changed."""

    numbers: torch.Tensor
    names: list[str]
    nothing: None = None


class Encoding(UserDict):
    """A batch as tokenizers of transformers make it: a mapping that can move itself."""

    def to(self, device: Any, **_: Any) -> Encoding:
        return Encoding({name: value.to(device) if hasattr(value, "to") else value for name, value in self.items()})


def batch_of(kind: str, numbers: torch.Tensor) -> Any:
    """The numbers, and their names, as a batch of a kind."""
    names = [f"n{number}" for number in numbers.tolist()]
    match kind:
        case "record":
            return Record(numbers, names)
        case "named tuple":
            return Pair(numbers, tuple(names))
        case "mapping":
            return {"inner": {"numbers": numbers, "nothing": None}, "names": names}
        case "encoding":
            return Encoding(numbers=numbers, names=names)
        case "names":
            return names
        case "list":
            return [numbers, [numbers * 2, names]]
    return [numbers, torch.tensor(0.5), {"empty": {}, "settings": "same"}]


KINDS = ["record", "named tuple", "mapping", "encoding", "names", "list", "numbers and a scalar"]


def wrong_ones(dispatch: bool, split: bool) -> list[str]:
    """The kinds of which this process did not see, or gather, what it should."""
    from accelerate_nb import Accelerator
    from accelerate_nb.utils import DataLoaderConfiguration

    wrong = []
    for kind in KINDS:
        config = DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
        accelerator = Accelerator(dataloader_config=config)

        def collate(samples: list[Any], kind: str = kind) -> Any:
            return batch_of(kind, torch.stack(samples))

        loader = accelerator.prepare(DataLoader(Numbers(11), 4, collate_fn=collate))
        plain = accelerator.prepare(DataLoader(Numbers(11), 4))
        gathered = []
        for batch, numbers in zip(loader, list(plain), strict=True):
            if typed(batch) != typed(batch_of(kind, numbers)):
                wrong.append(f"{kind}: {batch} for {numbers}")
            gathered.append(accelerator.gather_for_metrics(batch))
        step = 4 if split else 8
        for index, result in enumerate(gathered):
            expected = batch_of(kind, torch.arange(index * step, min(11, (index + 1) * step)))
            if typed(as_gathered(expected)) != typed(as_gathered(result)):
                wrong.append(f"{kind}: gathered {result} instead of {expected}")
    return wrong


def as_gathered(batch: Any) -> Any:
    """Without what is one thing a process, and with lists in place of tuples of names."""
    if isinstance(batch, Pair):
        return Pair(batch.numbers, list(batch.names))
    if isinstance(batch, Record):
        return Record(batch.numbers, batch.names)
    if isinstance(batch, dict):
        return {"names": batch["names"], "numbers": batch["inner"]["numbers"]}
    return batch[:1] if isinstance(batch, list) and len(batch) == 3 and isinstance(batch[2], dict) else batch


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
def test_every_kind_of_batch_arrives_and_is_gathered(dispatch: bool, split: bool) -> None:
    assert run_on_ranks(wrong_ones, 2, dispatch, split) == [[], []]


def test_a_batch_is_joined_and_cut_by_its_samples() -> None:
    for kind in KINDS:
        whole = joined([batch_of(kind, torch.arange(4)), batch_of(kind, torch.arange(4, 6))])
        assert size_of(whole) == 6
        assert typed(whole) == typed(batch_of(kind, torch.arange(6)))
        assert typed(cut(whole, slice(2, 5), 6)) == typed(batch_of(kind, torch.arange(2, 5)))
        assert typed(placed(whole, "cpu")) == typed(whole)


def test_a_data_class_goes_to_the_device_wherever_it_stands() -> None:
    record = Record(torch.arange(2), ["a", "b"])
    moved = placed({"inner": [record, (record, 3)], "record": record}, "meta")
    found = [moved["inner"][0], moved["inner"][1][0], moved["record"]]
    assert [item.numbers.device.type for item in found] == ["meta"] * 3
    assert record.numbers.device.type == "cpu"
    assert moved["inner"][1][1] == 3


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: size_of({"a": 3}), "no separate samples"),
        (lambda: cut([torch.ones(4), torch.ones(1, 3)], slice(0, 2), 4), r"4 samples .* shape \(1, 3\)"),
        (lambda: joined([{"a": torch.ones(1), "b": 1}, {"a": torch.ones(1), "b": 2}]), "a int that is not the same"),
        (lambda: joined([[torch.ones(1)], [torch.ones(1), torch.ones(1)]]), "hold 1, 2 things"),
    ],
)
def test_what_cannot_be_distinguished_is_an_error(act: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        act()
