"""Over a table of loaders, every process sees and gathers what it does under Hugging Face Accelerate, or what is right."""

import warnings
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from tests.peers import Peer, under_both
from tests.runtime.data.loaders import Numbers, Shuffled, Sized, Stream


@dataclass(frozen=True)
class Case:
    """One loader, and how it is prepared."""

    kind: str
    length: int
    size: int = 2
    drop: bool = False
    even: bool = True
    split: bool = False
    dispatch: bool | None = None

    @property
    def is_stream(self) -> bool:
        return self.kind.startswith("stream")

    def reads_as_often(self, world_size: int) -> bool:
        """Whether each of so many processes gets a batch in every step."""
        if self.even or self.drop or self.dispatch:
            return True
        step = self.size if self.split else self.size * world_size
        return -(-(self.length % step) * world_size // step) in (0, world_size)


def batches(length: int) -> list[list[int]]:
    """Batches of one, two, one, two ... indices, as somebody wrote them."""
    numbers = list(range(length))
    return [numbers[start : start + 1 + start % 3] for start in range(length) if start % 3 < 2]


def loader(case: Case) -> DataLoader[Any]:
    """The loader of a case as it is before it is prepared."""
    data = Numbers(case.length)
    match case.kind:
        case "shuffled" | "seedable":
            return DataLoader(data, case.size, drop_last=case.drop, shuffle=True)
        case "shuffled by a generator":
            generator = torch.Generator().manual_seed(3)
            return DataLoader(data, case.size, drop_last=case.drop, shuffle=True, generator=generator)
        case "some samples":
            sampler = SubsetRandomSampler(range(case.length))
            return DataLoader(Numbers(2 * case.length), case.size, drop_last=case.drop, sampler=sampler)
        case "batch sampler":
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), case.size, case.drop))
        case "sampler of batches":
            sampler = BatchSampler(SequentialSampler(data), case.size, case.drop)
            return DataLoader(List(case.length), sampler=sampler, batch_size=None)
        case "batches of any size":
            return DataLoader(data, batch_sampler=batches(case.length))
        case "stream":
            return DataLoader(Stream(case.length), case.size, drop_last=case.drop)
        case "stream with a length":
            return DataLoader(Sized(case.length), case.size, drop_last=case.drop)
        case "stream, shuffled":
            return DataLoader(Shuffled(case.length), case.size, drop_last=case.drop)
    return DataLoader(data, case.size, drop_last=case.drop)


class List(Numbers):
    """Numbers of which several are taken at once."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


ERRORS = (TypeError, AttributeError, ValueError, RuntimeError)


def value_or_error(ask: Any) -> Any:
    """What was said, or which kind of error was raised."""
    try:
        return ask()
    except ERRORS as error:
        return next(error_class.__name__ for error_class in ERRORS if isinstance(error, error_class))


def seen(peer: Peer, cases: list[Case]) -> list[dict[str, Any]]:
    """Two epochs of each case, with what the loader says of itself."""
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        torch.manual_seed(4)
        config = peer.door("utils").DataLoaderConfiguration(
            split_batches=case.split,
            even_batches=case.even,
            dispatch_batches=case.dispatch,
            use_seedable_sampler=case.kind == "seedable",
        )
        accelerator = peer.Accelerator(dataloader_config=config)
        prepared = value_or_error(partial(accelerator.prepare, loader(case)))
        names = ("batches", "epochs", "ends", "remainders", "gathered", "weighed")
        facts: dict[str, Any] = {name: [] for name in names}
        if isinstance(prepared, str):
            found.append({**facts, "len": prepared})
            continue
        for name in ("total_batch_size", "total_dataset_length"):
            facts[name] = value_or_error(partial(getattr, prepared, name))
        facts["len"] = value_or_error(prepared.__len__)
        for _ in range(2):
            for batch in prepared:
                facts["batches"].append(batch.tolist())
                facts["epochs"].append(prepared.iteration)
                facts["ends"].append(prepared.end_of_dataloader)
                facts["remainders"].append(prepared.remainder)
                if case.kind != "batches of any size" and case.reads_as_often(accelerator.num_processes):
                    loss = batch.float().mean()
                    facts["weighed"].append(accelerator.gather_for_metrics(loss.repeat(case.size)).tolist())
                if not case.even and case.dispatch is False:
                    continue  # processes may have different numbers of batches, or of samples
                if case.kind == "batches of any size":
                    facts["gathered"] += accelerator.gather_for_metrics(batch.tolist())
                else:
                    facts["gathered"] += accelerator.gather_for_metrics(batch).tolist()
        found.append({**facts, "drawn": torch.rand(1).item()})
    return found


SHUFFLED = ["shuffled", "seedable", "shuffled by a generator", "some samples", "batch sampler"]
LENGTHS = [1, 3, 4, 5, 8]
FLAGS = [False, True]
KINDS = ["plain", *SHUFFLED, "sampler of batches"]


def cases(world_size: int) -> list[Case]:
    """The table: everything that both can read on so many processes."""
    splits = FLAGS if world_size == 2 else [False]  # a batch of two can't be cut in three
    # on one process theirs reads nothing of a sampler of batches that is not even
    kinds = KINDS if world_size > 1 else ["plain", *SHUFFLED]
    found = [Case(kind, *rest, dispatch=False) for kind, *rest in product(kinds, LENGTHS, [2], FLAGS, FLAGS, splits)]
    streams = product(["stream", "stream with a length", "stream, shuffled"], LENGTHS, [2], FLAGS, [True], splits)
    found += [Case(*stream, dispatch=False) for stream in streams]
    found += [Case("batches of any size", *rest, dispatch=False) for rest in product(LENGTHS, [2], [False], FLAGS)]
    empty = product(["plain", "stream", "stream with a length"], [0], [2], FLAGS, [True], splits)
    found += [Case(*item, dispatch=False) for item in empty]
    # where drop_last leaves no batch, and for fewer samples than processes, theirs raises on some of the processes
    lengths = {1: [5, 8], 2: LENGTHS, 3: [5, 8, 9]}[world_size]
    dispatched = product(["plain", "shuffled", "stream", "stream, shuffled"], lengths, [2], FLAGS, [True], splits)
    return found + [Case(*item, dispatch=True) for item in dispatched if not item[3] or item[1] >= 8]


def difference(case: Case, world_size: int, name: str) -> str | None:
    """Where we differ on purpose: what is wrong with Accelerate's."""
    dealt_stream = case.is_stream and world_size > 1 and not case.dispatch
    if case.kind == "sampler of batches" and case.split:
        return "can't prepare a sampler of batches"
    if case.dispatch and name == "total_batch_size":
        return "asks the data set for the loader's batch size"
    if dealt_stream and name in ("total_batch_size", "total_dataset_length", "remainders", "len"):
        return "takes a process's share of a stream for the whole of it"
    if dealt_stream and name in ("gathered", "weighed"):
        return "keeps repeated samples of a stream"
    if case.kind == "batches of any size" and name == "gathered" and world_size > 1:
        return "keeps repeated batches whose size it does not know"
    if case.kind == "batches of any size" and name == "total_batch_size":
        return "raises a TypeError or an AttributeError for a size that isn't known"
    drops_unseen = case.drop and case.kind in ("batch sampler", "sampler of batches")
    if drops_unseen and name in ("gathered", "weighed"):
        return "cuts a whole last step, since it doesn't see that the batch sampler drops what is left"
    if case.kind == "some samples" and name in ("remainders", "gathered", "weighed"):
        return "counts what is left at the end by the whole data set, not by the samples that are read"
    if case.split and not (case.even or case.drop or case.dispatch) and world_size > 1 and name == "len":
        return "counts the part of a short last batch that a process does not get"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_process_sees_what_it_sees_under_accelerate(world_size: int) -> None:
    table = cases(world_size)
    both = under_both(seen, world_size, table)
    for rank, (theirs, ours) in enumerate(zip(both.theirs, both.ours, strict=True)):
        for case, their, our in zip(table, theirs, ours, strict=True):
            for name in our:
                if difference(case, world_size, name) is None:
                    assert our[name] == their[name], (rank, case, name)
            check_gathered(case, our)
    differing = {
        difference(case, world_size, name)
        for theirs, ours in zip(both.theirs, both.ours, strict=True)
        for case, their, our in zip(table, theirs, ours, strict=True)
        for name in our
        if our[name] != their.get(name)
    }
    named = {difference(case, world_size, name) for case in table for name in both.ours[0][0]}
    assert differing == named - {None}, "a difference that is none any more is to be taken off the list"


def check_gathered(case: Case, our: dict[str, Any]) -> None:
    """Each sample is gathered once in each of the two epochs; with `drop` some are left out, and none is there twice."""
    if not case.even:
        return
    half = len(our["gathered"]) // 2
    for epoch in (our["gathered"][:half], our["gathered"][half:]):
        assert len(set(epoch)) == len(epoch), case
        if not case.drop:
            assert sorted(epoch) == list(range(case.length)), case
        if case.kind not in (*SHUFFLED, "stream, shuffled"):
            assert epoch == sorted(epoch), case
