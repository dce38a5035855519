"""A loader knows its end, its epoch, and where it stands."""

import copy
import gc
import pickle
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.data.prepare import prepare_data_loader
from accelerate_nb.runtime.data.prepared_loader import skip_first_batches
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.world.registry import current_world
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.data.loaders import Numbers, Shuffled, Stream, plain

CPU = torch.device("cpu")


def prepared(data: Any, size: int = 2, options: dict[str, Any] | None = None, **more: Any) -> Any:
    loader = DataLoader(data, size, **more)
    return prepare_data_loader(loader, CPU, 1, 0, put_on_device=True, dispatch_batches=False, **(options or {}))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["indices", "stream"])
def test_the_last_batch_is_known_to_be_the_last(kind: str, workers: int) -> None:
    data = Numbers(5) if kind == "indices" else Stream(5)
    loader = prepared(data, 2, num_workers=workers)
    expected = [False] * (2 if workers == 0 or kind == "indices" else 5) + [True]
    assert [loader.end_of_dataloader for _ in loader] == expected
    assert [GradientState().end_of_dataloader for _ in loader] == expected


@dataclass
class LateLabel:
    values: torch.Tensor
    label: torch.Tensor = field(init=False)


def test_a_field_of_a_data_class_that_is_not_set_stays_so() -> None:
    (batch,) = prepared(Numbers(2), collate_fn=lambda samples: LateLabel(torch.ones(len(samples))))
    assert batch.values.tolist() == [1, 1]
    assert not hasattr(batch, "label")


def test_nothing_is_read_ahead_of_its_batch_and_what_is_skipped_is_not_read() -> None:
    indices: list[int] = []

    class Watched(Numbers):
        def __getitem__(self, index: int) -> Any:
            indices.append(index)
            return super().__getitem__(index)

    for number, _ in enumerate(prepared(Watched(6)), start=1):
        assert len(indices) == 2 * number
    indices.clear()
    assert len(list(skip_first_batches(prepared(Watched(8)), 2))) == 2
    assert indices == [4, 5, 6, 7]


def test_what_is_done_between_batches_is_no_reason_to_read_on_when_a_loop_is_left() -> None:
    events: list[str] = []

    class RecordedStream(Stream):
        def __iter__(self) -> Any:
            try:
                yield from super().__iter__()
            finally:
                events.append("not read any more")

    loader = prepared(RecordedStream(8))
    loader.between = lambda: events.append("between")
    batches = iter(loader)
    next(batches)
    ends, loader.end = loader.end, lambda: (events.append("left"), ends())
    batches.close()
    assert events == ["between", "not read any more", "left"]


@pytest.mark.parametrize("kind", ["indices", "stream"])
def test_leaving_an_epoch_leaves_nothing_behind(kind: str) -> None:
    outer, inner = prepared(Numbers(6)), prepared(Numbers(6) if kind == "indices" else Stream(6))
    gradients = GradientState()
    before = len(gradients.dataloader_references)
    for _ in outer:
        for _ in inner:
            assert gradients.active_dataloader is inner
            break
        assert gradients.active_dataloader is outer
        assert gradients.end_of_dataloader == outer.end_of_dataloader
    with pytest.raises(KeyError):
        for _ in outer:
            raise KeyError
    gc.collect()
    assert not gradients.in_dataloader
    assert len(gradients.dataloader_references) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_was_left_is_over(workers: int) -> None:
    settings: dict[str, Any] = {"shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
    loader = prepared(Numbers(64), options={"use_seedable_sampler": True}, **settings)
    left = [[plain(batch) for batch in islice(loader, 3)] for _ in range(3)]
    assert loader.iteration == 3
    loader.set_epoch(0)
    whole = [[plain(batch) for batch in loader][:3] for _ in range(3)]
    assert left == whole
    assert left[0] != left[1] != left[2]


def test_an_iterator_that_a_variable_holds_moves_no_epoch_and_a_loop_after_it_knows_its_end() -> None:
    loader = prepared(Numbers(4))
    held = iter(loader)
    next(held)
    for _ in loader:
        GradientState().training_calls += 1
    assert (loader.position()["epoch"], loader.position()["batches"], loader.end_of_dataloader) == (1, 0, False)
    del held
    assert loader.iteration == 1


def test_every_one_that_wants_to_know_receives_the_epoch() -> None:
    loader = prepared(Shuffled(4), 4)
    first, second = ([plain(batch) for batch in loader] for _ in range(2))
    assert first != second
    loader.set_epoch(0)
    assert [plain(batch) for batch in loader] == first


def go_on(how: str, stop: int, workers: int, persistent: bool = False) -> bool:
    """Whether what is read after a pause, by a new loader, is what would have been read without one."""
    options = {
        "use_seedable_sampler": how == "seedable",
        "rng_types": ["generator", "torch"][: 2 if how == "all generators" else 1],
        "split_batches": how == "split",
    }
    generator = torch.Generator().manual_seed(9) if how == "own generator" else None
    is_stream = "stream" in how
    data = Shuffled(11) if is_stream else Numbers(11, "augmented" if how == "augmented" else "plain")
    shuffle = None if is_stream else True

    def make() -> Any:
        order = {"shuffle": shuffle, "generator": generator}
        loader = DataLoader(data, 2, **order, num_workers=workers, persistent_workers=persistent)
        return prepare_data_loader(loader, CPU, put_on_device=True, dispatch_batches="dispatched" in how, **options)

    draws = 1 + current_world().rank  # processes draw what they like from torch's own generator
    torch.manual_seed(2)
    loader = make()
    list(loader)
    straight: list[Any] = []
    position: dict[str, Any] = {}
    rng_state = torch.get_rng_state()
    for number, batch in enumerate(loader, start=1):
        straight.append((plain(batch), loader.end_of_dataloader, torch.rand(draws).sum().item()))
        if number == stop:
            if how == "seedable" or is_stream:  # in others the next epoch's order depends on what was drawn before
                list(loader)
            position = copy.deepcopy(loader.position())
            rng_state = torch.get_rng_state()
            straight.clear()
    straight += [(plain(batch), loader.end_of_dataloader, torch.rand(draws).sum().item()) for batch in loader]

    torch.manual_seed(77)
    again = make()
    again.resume(pickle.loads(pickle.dumps(position)))
    torch.set_rng_state(rng_state)
    resumed: list[Any] = []
    length = len(again) if not is_stream else 6 if again.stride == 1 else 3
    for _ in range(2 if len(straight) > length else 1):
        resumed += [(plain(batch), again.end_of_dataloader, torch.rand(draws).sum().item()) for batch in again]
    return resumed == straight and again.iteration == loader.iteration


@pytest.mark.parametrize(
    "how",
    [
        *("global generator", "own generator", "all generators", "seedable", "augmented", "split"),
        *("stream", "dispatched", "dispatched stream"),
    ],
)
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_a_resumed_epoch_goes_on_where_it_was(how: str, size: int) -> None:
    for stop in (1, 6 // size):
        assert run_on_ranks(go_on, size, how, stop, 0) == [True] * size


@pytest.mark.parametrize("stays", [False, True])
def test_workers_go_on_too_and_those_that_stay_read_the_rest_of_an_epoch(stays: bool) -> None:
    assert run_on_ranks(go_on, 1, "global generator", 2, 2, stays) == [True]

    def epochs(skipped: int) -> list[Any]:
        torch.manual_seed(3)
        loader = DataLoader(Numbers(6), 2, shuffle=True, num_workers=1, persistent_workers=True)
        loader = prepare_data_loader(loader, CPU, 1, 0, put_on_device=True, dispatch_batches=stays)
        first = [plain(batch) for batch in skip_first_batches(loader, skipped)]
        return [first, *[[plain(batch) for batch in loader] for _ in range(2)], torch.rand(()).item()]

    (first, *others), (rest, *same) = epochs(0), epochs(1)
    assert (rest, same) == (first[1:], others)


def test_workers_that_run_already_take_up_an_epoch_whose_workers_did_not() -> None:
    torch.manual_seed(3)
    loader = prepared(Numbers(6), shuffle=True, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    position = loader.position()
    rest = [plain(batch) for batch in batches]
    loader.resume(position)
    assert [plain(batch) for batch in loader] == rest


def test_a_position_fits_any_number_of_processes() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(24), 2), num_processes=2, process_index=0)
    for _ in islice(loader, 3):
        position = loader.position()
    for index, numbers in enumerate([[12, 13], [14, 15], [16, 17]]):
        other = prepare_data_loader(DataLoader(Numbers(24), 2), num_processes=3, process_index=index)
        other.resume(position)
        assert plain(next(iter(other))) == numbers


def test_another_epoch_than_the_saved_one_begins_at_its_beginning_and_a_position_that_is_none_is_an_error() -> None:
    loader, other = prepared(Numbers(8)), prepared(Numbers(8))
    for _ in islice(loader, 2):
        position = loader.position()
    other.resume(position)
    assert other.position() == position
    other.set_epoch(5)
    assert len(list(other)) == 4
    with pytest.raises(StateError, match="without batches, epoch, generators, stride"):
        other.resume({})


@pytest.mark.parametrize("kind", ["indices", "stream"])
def test_the_rest_of_an_epoch_knows_its_end(kind: str) -> None:
    loader = prepared(Numbers(7) if kind == "indices" else Stream(7))
    rest = skip_first_batches(loader, 2)
    seen = [(plain(batch), rest.end_of_dataloader) for batch in rest]
    assert seen == [([4, 5], False), ([6], True)]
    assert loader.iteration == rest.iteration == 1
    if kind == "indices":
        assert (len(loader), len(rest), rest.remainder, rest.total_batch_size) == (4, 2, 1, 2)


def test_plain_loaders_can_skip_too() -> None:
    assert len(skip_first_batches(DataLoader(Numbers(7), 2), 2)) == 2
    for data in (Numbers(7), Stream(7)):
        assert [plain(batch) for batch in skip_first_batches(DataLoader(data, 2), 2)] == [[4, 5], [6]]
    assert [plain(item) for item in skip_first_batches(DataLoader(Numbers(7), None), 5)] == [5, 6]
    assert not GradientState().in_dataloader


def test_skipping_in_a_resumed_epoch_counts_from_its_beginning() -> None:
    loader, resumed = (prepared(Numbers(8), shuffle=True) for _ in range(2))
    list(loader)  # the second epoch is saved
    order = []
    for batch in loader:
        order.append(plain(batch))
        if len(order) == 2:
            position = loader.position()
    resumed.resume(position)
    assert [plain(batch) for batch in skip_first_batches(resumed, 1)] == order[1:]
    assert resumed.iteration == 2
    assert len(list(resumed)) == 4
