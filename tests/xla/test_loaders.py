"""Prepared loaders on an XLA device: what they hand out, where they stand, and what is raised in them."""

import threading
from collections.abc import Iterator
from contextlib import suppress
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
    return {
        "pair": (rows, [rows.int(), {"deep": rows[:0]}]),
        "names": ["a"] * len(rows),
        "none": None,
        "count": len(rows),
    }


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
    from torch.utils.data import DataLoader

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
    from torch.utils.data import DataLoader

    from accelerate_nb import Accelerator
    from accelerate_nb.data_loader import MpDeviceLoaderWrapper, prepare_data_loader

    inner = prepare_data_loader(DataLoader(torch.arange(3.0), batch_size=2), num_processes=1, process_index=0)
    loader = MpDeviceLoaderWrapper(inner, Accelerator().device)
    seen = [(shape(batch), loader.end_of_dataloader, threads()) for batch in loader]
    return {"length": len(loader), "seen": seen, "data": len(loader.dataset), "threads": threads()}


def compiled(accelerator: Any) -> int:
    """How many programs are compiled for batches that are one number each."""
    from torch.utils.data import DataLoader

    from accelerate_nb.runtime.xla.device import compilations, sync

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


def test_a_loader_has_its_length_its_data_and_its_end_at_the_last_batch(found):
    assert found["length"] == 3
    assert found["data"]
    assert found["whole"] == [("xla", 4, False, 2), ("xla", 4, False, 2), ("xla", 2, True, 2)]


def test_an_epoch_begins_at_its_beginning_after_one_that_was_left(found):
    assert found["after a break"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_first_batches_are_skipped(found):
    assert found["skipping"] == [[8, 9]]


def test_batches_stay_on_the_host_where_that_is_requested(found):
    assert found["on host"] == {"cpu"}


def test_a_batch_of_a_data_class_reaches_the_device(found):
    assert found["records"] == [("Record", "xla", ["n5"])] * 2


def test_what_the_data_set_raises_is_raised_in_the_loop(found):
    assert "sample 4 is broken" in found["error"]


def test_batches_of_workers_arrive_in_their_order(found):
    assert found["workers"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_position_counts_what_was_handed_out(found):
    assert found["position"] == 1


def test_a_batch_that_is_sent_by_a_thread_holds_what_it_held(found):
    rows = [[[0.0], [1.0]], [[2.0], [3.0]], [[4.0], [5.0]], [[6.0]]]
    for (batch, *_), numbers in zip(found["ahead"]["seen"], rows, strict=True):
        assert batch["pair"] == (("xla", numbers), [("xla", numbers), {"deep": ("xla", [])}])
        assert (batch["names"], batch["none"], batch["count"]) == (["a"] * len(numbers), None, len(numbers))


def test_what_is_set_of_a_loader_holds_for_the_batch_at_hand(found):
    facts = [rest for _, *rest in found["ahead"]["seen"]]
    assert facts == [[False, 1, 1], [False, 1, 2], [False, 1, 3], [True, 1, 0]]
    assert found["ahead"]["resumed"] == [["a", "a"], ["a", "a"], ["a"]]


def test_one_thread_sends_batches_and_none_is_left_after_an_epoch_a_break_an_error_or_a_forgotten_loop(found):
    assert found["ahead"]["threads"] == (1, 0)
    assert found["ahead"]["threads at last"] == 0


def test_the_wrapper_of_accelerate_sends_batches_in_the_background(found):
    seen = [(("xla", [0.0, 1.0]), False, 1), (("xla", [2.0]), True, 1)]
    assert found["wrapped"] == {"length": 2, "seen": seen, "data": 3, "threads": 0}


def test_single_numbers_are_data_and_not_part_of_the_program(found):
    assert found["compiled"] == 1


class Counts(torch.utils.data.IterableDataset[torch.Tensor]):
    """Samples that the main process reads for all."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(7.0))


def on_two_ranks() -> dict[str, Any]:
    """A training with accumulation whose batches are read by workers, and what the main process sends."""
    from torch.utils.data import DataLoader

    from accelerate_nb import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    data = torch.arange(10.0).reshape(10, 1)
    prepared = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=2, num_workers=1)
    )
    model, optimizer, loader = prepared
    stepped, seen = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        stepped.append(accelerator.sync_gradients)
        seen.append(accelerator.gather_for_metrics(batch))
    numbers = [
        accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(DataLoader(Counts(), batch_size=2))
    ]
    accelerator.wait_for_everyone()
    return {
        "stepped": stepped,
        "seen": [item.flatten().tolist() for item in seen],
        "dispatched": [number.tolist() for number in numbers],
        "weight": accelerator.unwrap_model(model).weight.item(),
    }


@pytest.mark.slow
def test_two_ranks_each_send_their_batches_ahead(on_xla):
    first, second = on_xla(on_two_ranks, num_processes=2)
    assert first == second
    assert first["stepped"] == [False, True, True]
    assert first["seen"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert first["dispatched"] == [[0, 1, 2, 3], [4, 5, 6]]
