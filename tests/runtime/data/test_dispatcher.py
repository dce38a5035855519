"""What the main process reads reaches every process."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.errors import OperationError
from accelerate_nb.parallelism_config import ParallelismConfig
from accelerate_nb.runtime.data.prepare import prepare_data_loader
from accelerate_nb.runtime.data.prepared_loader import skip_first_batches
from accelerate_nb.runtime.operations.collective import gather
from accelerate_nb.runtime.world.registry import current_world
from accelerate_nb.utils import DataLoaderConfiguration
from tests.peers import Peer, under_both
from tests.ranks import RanksFailed, run_on_ranks
from tests.runtime.data.loaders import Broken, Numbers, OfWorkers, Stream, plain

pytestmark = pytest.mark.filterwarnings("ignore:.*were repeated ones")
CPU = torch.device("cpu")


def with_tensor_parallel_mesh(peer: Peer) -> Any:
    """The batches of prepared loaders, read by each process and dispatched, on a mesh along which a model is split."""
    peer.Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    prepare = peer.door("data_loader").prepare_data_loader
    loaders = [DataLoader(data, 4, drop_last=True) for data in (Numbers(13), Stream(13))]
    options = {"put_on_device": True, "torch_device_mesh": mesh}
    return [plain(batch) for loader in loaders for batch in prepare(loader, CPU, **options)]


def test_processes_of_one_copy_of_a_model_read_the_same_batches_as_with_accelerate() -> None:
    both = under_both(with_tensor_parallel_mesh, 2)
    assert both.ours == both.theirs
    assert both.ours[0] == both.ours[1]


def dispatched(length: int, split: dict[str, int] | None = None, size: int | None = 2) -> Any:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**split) if split else None)
    loader = accelerator.prepare(DataLoader(Stream(length), size))
    return [(plain(batch), plain(accelerator.gather_for_metrics(batch))) for batch in loader], loader.total_batch_size


@pytest.mark.parametrize("axis", ["tp_size", "cp_size"])
def test_a_dispatched_batch_is_the_same_for_processes_that_split_a_model(axis: str) -> None:
    batches = [[0, 1], [2, 3], [4]]
    assert run_on_ranks(dispatched, 2, 5, {axis: 2}) == [([(batch, batch) for batch in batches], 2)] * 2
    assert run_on_ranks(dispatched, 2, 2, {axis: 2}, None) == [([(0, 0), (1, 1)], 1)] * 2  # what can't be cut


def test_fewer_samples_than_processes_are_repeated() -> None:
    assert run_on_ranks(dispatched, 3, 1) == [([([0], [0])], 6)] * 3
    expected = [([(batch, [0, 1, 2, 3, 4])], 6) for batch in ([0, 1], [2, 3], [4, 0])]
    assert run_on_ranks(dispatched, 3, 5) == expected


def breaks() -> Any:
    accelerator = Accelerator(cpu=True)
    seen = []
    try:
        for batch in accelerator.prepare(DataLoader(Broken(9), 1)):
            seen.append(plain(batch))
    except (OSError, OperationError) as error:
        return seen, str(error)


def test_an_error_of_the_reader_reaches_all() -> None:
    (first, main_message), (second, other_message) = run_on_ranks(breaks, 2)
    assert (first, second) == ([], [])  # the error comes while the main process looks for a batch after the first
    assert main_message == "the disk is gone"
    assert other_message == "The main process could not read the next batch: OSError: the disk is gone"


class Uneven(Stream):
    def __iter__(self) -> Any:
        return iter([torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(3)])


def with_a_generator(samples: list[Any]) -> Any:
    return {"numbers": torch.stack(samples), "names": (sample for sample in samples)}


def reads(*loader: Any) -> None:
    data, size, collate = loader
    list(Accelerator(cpu=True).prepare(DataLoader(data, size, collate_fn=collate)))


def test_what_can_not_be_dispatched_is_an_error_on_all() -> None:
    for loader, message in (
        ((Stream(4), 2, with_a_generator), r"rank 0:.*not the same in all, and no row a sample.*rank 1:.*a generator"),
        ((Uneven(4), 1, None), r"rank 0:.*Pass dispatch_batches=False.*rank 1:.*Pass dispatch_batches=Fa"),
    ):
        with pytest.raises(RanksFailed, match=f"(?s){message}"):
            run_on_ranks(reads, 2, *loader)


# The numbers of samples of each worker, the batch size, and split_batches.
UNEQUAL: list[tuple[tuple[int, ...], int, bool]] = [
    ((6, 3), 2, False), ((1, 1, 1), 2, False), ((7, 1), 4, True), ((5, 4, 3), 6, False),
]  # fmt: skip


def read_by_unequal_workers() -> list[Any]:
    found = []
    for counts, size, split in UNEQUAL:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split))
        loader = accelerator.prepare(DataLoader(OfWorkers(*counts), size, num_workers=len(counts)))
        batches = [(plain(batch), plain(accelerator.gather_for_metrics(batch))) for batch in loader]
        after = accelerator.skip_first_batches(loader, 1)
        rest = [(plain(batch), plain(accelerator.gather_for_metrics(batch))) for batch in after]
        found.append((batches, rest))
    return found


def test_no_sample_is_lost_where_a_worker_ends_before_another() -> None:
    first, second = run_on_ranks(read_by_unequal_workers, 2)
    for (counts, size, split), (batches, rest), (others, _) in zip(UNEQUAL, first, second, strict=True):
        numbers = OfWorkers(*counts).numbers
        assert {number for batch, _ in batches + others for number in batch} == set(numbers)
        assert sorted(number for _, gathered in batches for number in gathered) == numbers
        assert rest == batches[1:]
        assert all(len(batch) <= (size // 2 if split else size) for batch, _ in batches + others)


def sliced() -> Any:
    def every_other(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        return batch[process_index::num_processes]

    loader = prepare_data_loader(DataLoader(Stream(8), 2), CPU, put_on_device=True, slice_fn_for_dispatch=every_other)
    return [plain(batch) for batch in loader], loader.total_batch_size


def test_a_batch_may_be_cut_in_another_way() -> None:
    assert run_on_ranks(sliced, 2) == [([[0, 2], [4, 6]], 4), ([[1, 3], [5, 7]], 4)]


def test_one_process_reads_what_could_not_be_cut() -> None:
    for size, expected in ((None, [0, 1, 2]), (2, [[0, 1], [2]])):
        loader = prepare_data_loader(DataLoader(Stream(3), size), CPU, put_on_device=True)
        assert [(plain(batch), loader.end_of_dataloader) for batch in loader][-1] == (expected[-1], True)
        assert [plain(batch) for batch in loader] == expected
        assert [plain(batch) for batch in skip_first_batches(loader, 1)] == expected[1:]


def leaves_alone(who: int) -> tuple[str, list[int]]:
    loader = prepare_data_loader(DataLoader(Numbers(12), 2), CPU, put_on_device=True, dispatch_batches=True)
    rank = current_world().rank
    message = ""
    try:
        for _ in loader:
            if rank == who:
                break
        gather(torch.tensor([rank]))
    except OperationError as error:
        message = str(error)
    return message, gather(torch.tensor([rank])).tolist()


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_leaves_a_loader_alone_is_an_error_on_all(who: int) -> None:
    for message, after in run_on_ranks(leaves_alone, 2, who):
        assert f"rank {1 - who}: next(a loader whose batches the main process dispatches)" in message
        assert f"rank {who}: gather(int64[1])" in message
        assert after == [0, 1]
