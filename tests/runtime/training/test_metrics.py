"""What is gathered for metrics holds each sample once."""

import warnings
from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.utils import DataLoaderConfiguration
from tests.peers import Peer, under_both
from tests.ranks import run_on_ranks
from tests.runtime.data.loaders import OfWorkers, Stream


def of_every_kind(length: int) -> dict[str, Any]:
    """What is gathered of the last batch, and what was said about it."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for numbers in accelerator.prepare(DataLoader(torch.arange(length), batch_size=4)):
            names = [f"n{number}" for number in numbers.tolist()]
            found = {
                "statistics": accelerator.gather_for_metrics(torch.ones(3) * rank).tolist(),
                "dictionary of numbers": accelerator.gather_for_metrics({"loss": rank, "name": "x"}),
                "number": accelerator.gather_for_metrics(0.5 + rank),
                "text": accelerator.gather_for_metrics("text"),
                "none": accelerator.gather_for_metrics(None),
                "mixed": accelerator.gather_for_metrics({"numbers": numbers, "names": names, "count": 4}),
                "mean": accelerator.gather_for_metrics(torch.tensor(float(rank))).tolist(),
                "rows as objects": accelerator.gather_for_metrics(numbers, use_gather_object=True),
                "array": accelerator.gather_for_metrics(numbers.numpy()),
                "dictionary as an object": accelerator.gather_for_metrics({"rank": rank}, use_gather_object=True),
                "samples of any length": accelerator.gather_for_metrics([[name] * rank for name in names]),
            }
    return found | {"warned": [str(item.message) for item in caught]}


def test_whatever_is_gathered_is_right_or_kept_whole_with_a_warning() -> None:
    first, second = run_on_ranks(of_every_kind, 2, 9)
    assert first == second
    (warned,) = first.pop("warned")
    assert "given 3 rows for the 4 samples" in warned
    assert "7 of 8 samples of the loader's last step are repeated ones" in warned
    assert first == {
        "dictionary of numbers": {"loss": [0, 1], "name": ["x", "x"]},
        "number": [0.5, 1.5],
        "text": ["text", "text"],
        "none": [None, None],
        "mixed": {"numbers": torch.tensor([8]), "names": ["n8"], "count": [4, 4]},
        "mean": [0.0, 1.0],
        "rows as objects": [torch.tensor(8)],
        "array": [8],
        "dictionary as an object": [{"rank": 0}, {"rank": 1}],
        "samples of any length": [[]],
        "statistics": [0, 0, 0, 1, 1, 1],  # not one row a sample
    }


def alone(peer: Peer) -> dict[str, Any]:
    """What the only process gathers of its last batch, which has 5 of 8 samples."""
    accelerator = peer.Accelerator()
    found: dict[str, Any] = {}
    for numbers in accelerator.prepare(DataLoader(torch.arange(13), batch_size=8)):
        loss = numbers.float().mean()
        found = {
            "repeated": accelerator.gather_for_metrics(loss.repeat(8)),
            "rows": accelerator.gather_for_metrics(numbers),
            "nested": accelerator.gather_for_metrics({"a": (loss.repeat(8), [numbers]), "b": numbers}),
            "list": accelerator.gather_for_metrics([f"n{number}" for number in range(8)]),
            "as objects": accelerator.gather_for_metrics([loss] * 8, use_gather_object=True),
        }
        if peer.is_ours:
            for whole in (0.5, "a text that is long", {"loss": 0.5}, None, loss, ["a", "column"]):
                assert accelerator.gather_for_metrics(whole) == whole
            assert len(accelerator.gather_for_metrics(loss.repeat(8), use_gather_object=True)) == len(numbers)
    return found


def test_one_process_cuts_what_it_cuts_under_accelerate() -> None:
    both = under_both(alone, 1)
    assert str(both.ours) == str(both.theirs)
    assert len(both.ours[0]["repeated"]) == len(both.ours[0]["list"]) == 5


@dataclass
class Detection:
    """What a model found in one image."""

    boxes: torch.Tensor
    label: str


Named = namedtuple("Named", ["boxes", "label"])


def boxes(number: int) -> torch.Tensor:
    """The boxes of an image, of which there are 0 to 2."""
    return torch.full((number % 3, 4), number)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "dictionary": lambda number: {"boxes": boxes(number), "id": number},
    "dictionary of columns": lambda number: {"boxes": torch.ones(2, 4), "labels": ["cat", f"dog {number}"]},
    "nested dictionary": lambda number: {"boxes": [boxes(number)], "meta": {"id": number}},
    "tuple": lambda number: (boxes(number), number),
    "list": lambda number: [f"image {number}", boxes(number)],
    "named tuple": lambda number: Named(boxes(number), "x"),
    "data class": lambda number: Detection(boxes(number), "x"),
    "nothing in some": lambda number: boxes(number) if number % 2 else None,
    "dictionaries of a sample": lambda number: [{"boxes": boxes(number), "id": part} for part in range(number + 1)],
    "text": lambda number: f"text {number}",
    "array": lambda number: {"boxes": boxes(number).numpy(), "at": boxes(number)},
}
ALIKE = ("dictionary", "named tuple", "data class", "text")


def samples_gathered(peer: Peer) -> dict[str, str]:
    """What is gathered in an epoch of lists with one thing a sample; and here, too, of what holds such lists."""
    accelerator = peer.Accelerator()
    found: dict[str, list[Any]] = defaultdict(list)
    for numbers in accelerator.prepare(DataLoader(torch.arange(7), batch_size=2)):
        ids = numbers.tolist()
        ragged = [boxes(number) for number in ids]
        found["ragged tensors"] += accelerator.gather_for_metrics(ragged, use_gather_object=True)
        for name, sample in SAMPLES.items():
            samples = [sample(number) for number in ids]
            found[name] += accelerator.gather_for_metrics(samples)
            if not peer.is_ours:
                continue
            if name in ALIKE:
                found[f"tuple of {name}"] += accelerator.gather_for_metrics(tuple(samples))
            for key, value in {
                "in a dictionary": {"found": samples, "at": numbers, "ragged": ragged, "ids": ids},
                "in a tuple": (samples, numbers, ids),
                "in a batch": [numbers, {"found": samples}, tuple(ids)],
            }.items():
                found[f"{name} {key}"].append(accelerator.gather_for_metrics(value))
    return {name: repr(value) for name, value in found.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_with_tensors_are_gathered_one_entry_each_as_under_accelerate(world_size: int) -> None:
    both = under_both(samples_gathered, world_size)
    steps = [[0, 1], [2, 3], [4, 5], [6]] if world_size == 1 else [[0, 1, 2, 3], [4, 5, 6]]
    ids_of = tuple if world_size == 1 else list
    for theirs, ours in zip(both.theirs, both.ours, strict=True):
        assert {name: ours[name] for name in theirs} == theirs
        for name, sample in SAMPLES.items():
            assert ours[name] == repr([sample(number) for number in range(7)])
            assert ours.get(f"tuple of {name}", ours[name]) == ours[name]
            values = [([sample(number) for number in ids], torch.tensor(ids), ids) for ids in steps]
            in_dictionaries, in_batches = [], []
            for samples, at, ids in values:
                in_dictionaries.append({"found": samples, "at": at, "ragged": [*map(boxes, ids)], "ids": ids})
                in_batches.append([at, {"found": samples}, ids_of(ids)])
            assert ours[f"{name} in a dictionary"] == repr(in_dictionaries)
            assert ours[f"{name} in a tuple"] == repr(values)
            assert ours[f"{name} in a batch"] == repr(in_batches)


class SizedOfWorkers(OfWorkers):
    """The same with a length."""

    def __len__(self) -> int:
        return sum(self.counts)


def dealt_by_workers() -> dict[str, list[int]]:
    """What is gathered in two epochs of streams that each process reads with workers, which fill up their last steps."""
    loaders: dict[str, DataLoader[Any]] = {
        "stay": DataLoader(OfWorkers(3, 6), 2, num_workers=2, persistent_workers=True),
        "single samples": DataLoader(OfWorkers(3, 6), None, num_workers=2),
        "with a length": DataLoader(SizedOfWorkers(3, 3), 2, num_workers=2),
        "three": DataLoader(OfWorkers(1, 5, 0), 4, num_workers=3),
    }
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    return {
        name: [
            number
            for prepared in [accelerator.prepare(loader)]
            for _ in range(2)
            for batch in prepared
            for number in accelerator.gather_for_metrics(batch).tolist()
        ]
        for name, loader in loaders.items()
    }


def test_samples_that_workers_repeat_are_left_out_wherever_they_come() -> None:
    first, second = run_on_ranks(dealt_by_workers, 2)
    assert first == second
    numbers = {"with a length": OfWorkers(3, 3).numbers, "three": OfWorkers(1, 5, 0).numbers}
    for name, found in first.items():
        assert sorted(found) == sorted(numbers.get(name, OfWorkers(3, 6).numbers) * 2)


class Grouped(list[list[int]]):
    """Batches of at most 4 indices, as a sampler that groups samples may give."""

    batch_size = 4


def last_of_each_loader() -> dict[str, list[Any]]:
    """What the only process gathers at the end of several loaders: the samples, a number for each, their names."""
    accelerator = Accelerator()
    half = torch.utils.data.SubsetRandomSampler(range(6))
    loaders = {
        "divides": DataLoader(torch.arange(8), batch_size=4),
        "smaller than a batch": DataLoader(torch.arange(3), batch_size=4),
        "single samples": DataLoader(torch.arange(3)),
        "the rest dropped": DataLoader(torch.arange(7), batch_size=4, drop_last=True),
        "half of the data": DataLoader(torch.arange(11), batch_size=4, sampler=half),
        "short batch first": DataLoader(torch.arange(7), batch_sampler=Grouped([[0, 1, 2], [3, 4, 5, 6]])),
        "read by a worker": DataLoader(torch.arange(7), batch_size=4, num_workers=1),
        "stream": DataLoader(Stream(7), batch_size=4),
    }
    found = {}
    for name, loader in loaders.items():
        size = 4 if loader.batch_size is None else loader.batch_size
        for batch in accelerator.prepare(loader):
            columns = accelerator.gather_for_metrics((batch, torch.ones(size), ["name"] * size))
            found[name] = [len(column) for column in columns]
    return found


def test_one_process_cuts_by_what_its_last_batch_really_holds() -> None:
    (found,) = run_on_ranks(last_of_each_loader, 1)
    assert found == {
        "divides": [4, 4, 4],
        "smaller than a batch": [3, 3, 3],
        "single samples": [1, 1, 1],
        "the rest dropped": [4, 4, 4],
        "half of the data": [2, 2, 2],
        "short batch first": [4, 4, 4],
        "read by a worker": [3, 3, 3],
        "stream": [3, 3, 3],
    }


def loops_in_loops() -> dict[str, list[int]]:
    """How many rows are gathered in a loop that holds another one, and around one that is left early."""
    accelerator = Accelerator()
    outer = accelerator.prepare(DataLoader(torch.arange(7), batch_size=4))
    inner = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))
    rows: dict[str, list[int]] = {"outer": [], "inner": [], "after break": [], "outside": []}
    for _ in outer:
        for _ in inner:
            rows["inner"].append(len(accelerator.gather_for_metrics(torch.ones(2))))
        rows["outer"].append(len(accelerator.gather_for_metrics(torch.ones(4))))
        for _ in inner:
            break
        rows["after break"].append(len(accelerator.gather_for_metrics(torch.ones(4))))
    rows["outside"].append(len(accelerator.gather_for_metrics(torch.ones(4))))
    return rows


def test_rows_are_those_of_the_innermost_loop() -> None:
    (found,) = run_on_ranks(loops_in_loops, 1)
    assert found == {"inner": [2, 2, 1] * 2, "outer": [4, 3], "after break": [4, 3], "outside": [4]}


def epochs() -> dict[str, list[str]]:
    """The warnings of two epochs with repeated samples, by what each step does with its batch."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(layer := torch.nn.Linear(1, 1), torch.optim.SGD(layer.parameters()))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch.float().unsqueeze(1)).square()
        return loss

    def trains(batch: torch.Tensor) -> None:
        loss = loss_of(batch).mean()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.gather(loss.detach())
        accelerator.reduce(loss.detach())

    def trains_by_torch(batch: torch.Tensor) -> None:
        loss_of(batch).mean().backward()
        optimizer.step()

    def trains_and_gathers(batch: torch.Tensor) -> None:
        trains(batch)
        accelerator.gather({"loss": loss_of(batch).detach()})

    steps: dict[str, Any] = {
        "trains": trains,
        "trains by torch": trains_by_torch,
        "trains and gathers": trains_and_gathers,
        "evaluates": accelerator.gather_for_metrics,
        "gathers": accelerator.gather,
        "sums": lambda batch: accelerator.reduce(batch.sum()),
        "counts": len,
    }
    found = {}
    for name, step in steps.items():
        loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=4))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                for batch in loader:
                    step(batch)
        found[name] = [str(item.message).split(",")[0] for item in caught]
    return found


def test_repeated_samples_are_reported_once_by_the_main_process_where_a_number_may_count_them() -> None:
    main, other = run_on_ranks(epochs, 2)
    once = ["5 of the 16 samples of this epoch were repeated ones"]
    calm = {"trains": [], "trains by torch": [], "evaluates": []}
    assert main == {**calm, "trains and gathers": once, "gathers": once, "sums": once, "counts": once}
    assert set(map(len, other.values())) == {0}
