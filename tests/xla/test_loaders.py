"""Prepared loaders on an XLA device: what they hand out, where they stand, and what is raised in them."""

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.data_loader import MpDeviceLoaderWrapper, prepare_data_loader
from accelerate_nb.runtime.xla.device import compilations, sync


@dataclass
class Record:
    """A batch of a class of its own."""

    inputs: torch.Tensor
    names: list[str]


class Breaks(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose fifth sample can't be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            raise KeyError("sample 4 is broken")
        return torch.ones(2)


def as_record(samples: list[Any]) -> Record:
    return Record(torch.stack(samples), [f"n{len(samples)}"])


def loaders() -> dict[str, Any]:
    accelerator = Accelerator()
    data = torch.arange(10.0).reshape(10, 1)
    loader = accelerator.prepare(DataLoader(data, batch_size=4))
    found: dict[str, Any] = {"length": len(loader), "data": loader.dataset is data}
    state = loader.gradient_state
    seen = []
    for batch in loader:
        seen.append((batch.device.type, len(batch), state.end_of_dataloader, state.remainder))
    found["whole"] = seen
    for _ in loader:
        break
    found["after a break"] = [batch.flatten().tolist() for batch in loader]
    found["skipping"] = [batch.flatten().tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    on_host = accelerator.prepare_data_loader(DataLoader(data, batch_size=4), device_placement=False)
    found["on host"] = {batch.device.type for batch in on_host}
    records = accelerator.prepare(DataLoader(data, batch_size=5, collate_fn=as_record))
    found["records"] = [(type(record).__name__, record.inputs.device.type, record.names) for record in records]
    try:
        list(accelerator.prepare(DataLoader(Breaks(), batch_size=2)))
    except KeyError as error:
        found["error"] = str(error)
    workers = accelerator.prepare(DataLoader(data, batch_size=4, num_workers=1))
    found["workers"] = [batch.flatten().tolist() for batch in workers]
    found["ahead"] = ahead(accelerator)
    found["wrapped"] = wrapped()
    found["compiled"] = compiled(accelerator)
    reader = iter(loader)
    next(reader)
    found["position"] = loader.position()["batches"]
    reader.close()
    return found


def nested(samples: list[Any]) -> dict[str, Any]:
    rows = torch.stack(samples)
    pair = rows, [rows.int(), {"deep": rows[:0]}]
    return {"pair": pair, "names": ["a"] * len(rows), "none": None, "count": len(rows)}


def shape(batch: Any) -> Any:
    """What a batch holds: of each tensor its device and numbers."""
    if isinstance(batch, torch.Tensor):
        return batch.device.type, batch.tolist()
    if isinstance(batch, dict):
        return {key: shape(value) for key, value in batch.items()}
    return type(batch)(map(shape, batch)) if isinstance(batch, (list, tuple)) else batch


def threads() -> int:
    return sum(item.name == "accelerate-nb batches" for item in threading.enumerate())


def ahead(accelerator: Any) -> dict[str, Any]:
    """What is seen of a loader whose batches workers read and a thread sends."""
    data = torch.arange(7.0).reshape(7, 1)
    settings = {"num_workers": 1, "persistent_workers": True, "collate_fn": nested}
    loader = accelerator.prepare(DataLoader(data, batch_size=2, **settings))
    seen, during = [], 0
    for batch in loader:
        during = max(during, threads())
        seen.append((shape(batch), loader.end_of_dataloader, loader.remainder, loader.position()["batches"]))
    for _ in loader:
        break
    found = {"seen": seen, "threads": (during, threads())}
    with suppress(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError
    reader = iter(loader)
    next(reader)
    position = loader.position()
    del reader
    loader.resume(position)
    return {**found, "resumed": [batch["names"] for batch in loader], "threads at last": threads()}


def wrapped() -> dict[str, Any]:
    """Accelerate's wrapper around a loader that knows no device."""
    inner = prepare_data_loader(DataLoader(torch.arange(3.0), batch_size=2), num_processes=1, process_index=0)
    loader = MpDeviceLoaderWrapper(inner, Accelerator().device)
    seen = [(shape(batch), loader.end_of_dataloader, threads()) for batch in loader]
    return {"length": len(loader), "seen": seen, "data": len(loader.dataset), "threads": threads()}


def compiled(accelerator: Any) -> int:
    """How many programs are compiled for batches that are one number each."""
    sums, before = [], 0
    for batch in accelerator.prepare(DataLoader(torch.tensor([0.0, 1.0, 0.0, 1.0]), batch_size=None)):
        sync()
        before = before or compilations()
        sums.append(batch * 2)
        sync()
    found = compilations() - before
    assert torch.stack(sums).tolist() == [0, 2, 0, 2]
    return found


@pytest.fixture(scope="module")
def found(launched_on_xla) -> dict[str, Any]:
    return launched_on_xla(loaders)[0]


EPOCH = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("what", "expected"),
    {
        "length": 3,
        "data": True,
        "whole": [("xla", 4, False, 2), ("xla", 4, False, 2), ("xla", 2, True, 2)],
        "after a break": EPOCH,
        "skipping": [[8, 9]],
        "on host": {"cpu"},
        "records": [("Record", "xla", ["n5"])] * 2,
        "error": "'sample 4 is broken'",
        "workers": EPOCH,
        "position": 1,
        # single numbers are data, and no part of the program
        "compiled": 1,
    }.items(),
)
def test_a_loader_hands_out_its_batches_on_the_device_and_knows_where_it_stands(found, what, expected):
    assert found[what] == expected


def test_a_batch_that_is_sent_by_a_thread_holds_what_it_held_and_is_the_one_that_the_loader_speaks_of(found):
    rows = [[[0.0], [1.0]], [[2.0], [3.0]], [[4.0], [5.0]], [[6.0]]]
    for (batch, *_), numbers in zip(found["ahead"]["seen"], rows, strict=True):
        assert batch["pair"] == (("xla", numbers), [("xla", numbers), {"deep": ("xla", [])}])
        assert (batch["names"], batch["none"], batch["count"]) == (["a"] * len(numbers), None, len(numbers))
    facts = [rest for _, *rest in found["ahead"]["seen"]]
    assert facts == [[False, 1, 1], [False, 1, 2], [False, 1, 3], [True, 1, 0]]
    assert found["ahead"]["resumed"] == [["a", "a"], ["a", "a"], ["a"]]
    # one thread sends them, and none is left after an epoch, a break, an error or a forgotten loop
    assert found["ahead"]["threads"] == (1, 0)
    assert found["ahead"]["threads at last"] == 0
    # also of Accelerate's wrapper
    seen = [(("xla", [0.0, 1.0]), False, 1), (("xla", [2.0]), True, 1)]
    assert found["wrapped"] == {"length": 2, "seen": seen, "data": 3, "threads": 0}
