"""Prepared loaders on an XLA device: what they hand out, where they stand, and what is raised in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch


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
    from torch.utils.data import DataLoader

    from accelerate_nb import Accelerator

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
    found["records"] = [(type(each).__name__, each.inputs.device.type, each.names) for each in records]
    try:
        list(accelerator.prepare(DataLoader(Breaks(), batch_size=2)))
    except KeyError as error:
        found["error"] = str(error)
    workers = accelerator.prepare(DataLoader(data, batch_size=4, num_workers=1))
    found["workers"] = [batch.flatten().tolist() for batch in workers]
    reader = iter(loader)
    next(reader)
    found["position"] = loader.position()["batches"]
    reader.close()
    return found


@pytest.fixture(scope="module")
def found(launched_on_xla) -> dict[str, Any]:
    return launched_on_xla(loaders)[0]


def test_a_loader_has_its_length_its_data_and_its_end_at_the_last_batch(found):
    assert found["length"] == 3
    assert found["data"]
    assert found["whole"] == [("xla", 4, False, 2), ("xla", 4, False, 2), ("xla", 2, True, 2)]


def test_an_epoch_begins_at_its_beginning_after_one_that_was_left(found):
    assert found["after a break"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_first_batches_are_skipped(found):
    assert found["skipping"] == [[8, 9]]


def test_batches_stay_on_the_host_where_that_is_asked(found):
    assert found["on host"] == {"cpu"}


def test_a_batch_of_a_data_class_reaches_the_device(found):
    assert found["records"] == [("Record", "xla", ["n5"])] * 2


def test_what_the_data_set_raises_is_raised_in_the_loop(found):
    assert "sample 4 is broken" in found["error"]


def test_batches_of_workers_arrive_in_their_order(found):
    assert found["workers"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_position_counts_what_was_handed_out(found):
    assert found["position"] == 1
