"""Whatever function a notebook has made runs on every process, with all that it uses."""

from __future__ import annotations

import pytest

from tests.kernel.kernels import Kernel


def test_closures_lambdas_and_nested_functions_run(kernel: Kernel) -> None:
    kernel.ok("""
    import os
    offset = 100

    def made(factor):
        def inner(value):
            def innermost():
                return factor * value + offset + int(os.environ["RANK"])
            return innermost()
        return inner

    closure = notebook_launcher(made(3), (2,), num_processes=2, results="all")
    anonymous = notebook_launcher(lambda value: value + offset, (5,), num_processes=2, results="all")
    """)
    assert kernel.value("closure") == [106, 107]
    assert kernel.value("anonymous") == [105, 105]


def test_classes_of_cells_travel_there_and_back_and_between_ranks(kernel: Kernel) -> None:
    kernel.ok("""
    from dataclasses import dataclass
    import torch.distributed as dist

    @dataclass
    class Score:
        rank: int

    class Better(Score):
        def __init__(self, rank):
            super().__init__(rank)

    def exchanged(first):
        assert isinstance(first, Score)
        dist.init_process_group("gloo")
        everyone = [None] * dist.get_world_size()
        # torch uses the plain pickle, which looks classes up by their names
        dist.all_gather_object(everyone, Better(dist.get_rank() + first.rank))
        assert all(isinstance(one, Better) for one in everyone)
        return everyone

    came = notebook_launcher(exchanged, (Score(10),), num_processes=2)
    """)
    assert kernel.value("[one.rank for one in came]") == [10, 11]
    assert kernel.value("all(isinstance(one, Better) for one in came)")


def test_a_dataset_of_a_cell_is_read_by_workers_of_a_data_loader(kernel: Kernel) -> None:
    kernel.ok("""
    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info

    class Squares(Dataset):
        def __init__(self, values):
            self.values = values
        def __len__(self):
            return len(self.values)
        def __getitem__(self, index):
            return self.values[index] ** 2, get_worker_info().id

    def read(data):
        batches = list(DataLoader(data, batch_size=2, num_workers=2))
        return torch.cat([values for values, _ in batches]).tolist(), {int(one) for _, ids in batches for one in ids}

    seen = notebook_launcher(read, (Squares(torch.arange(6)),), num_processes=2, results="all")
    """)
    assert kernel.value("[values for values, _ in seen]") == [[0, 1, 4, 9, 16, 25]] * 2
    assert kernel.value("[sorted(ids) for _, ids in seen]") == [[0, 1]] * 2


def test_tensors_and_arrays_are_captured_and_passed_and_stay_what_they_are_here(kernel: Kernel) -> None:
    kernel.ok("""
    import numpy, torch
    whole = torch.arange(12.0).reshape(3, 4)
    column, array = whole[:, 1], numpy.arange(5, dtype="int16")

    def changed(passed):
        assert column.stride() == (4,) and column.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        whole.add_(1)
        array[:] = 7
        passed *= 2
        return column.tolist(), array.tolist(), passed.dtype == torch.bfloat16, passed.sum().item()

    given = torch.ones(4, dtype=torch.bfloat16)
    there = notebook_launcher(changed, (given,), num_processes=2, results="all")
    """)
    # a worker's writes change neither the notebook's values nor another worker's
    assert kernel.value("there") == [[[2, 6, 10], [7] * 5, True, 8.0]] * 2
    assert kernel.value("[whole[0].tolist(), array.tolist(), given.tolist()]") == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [1] * 4,
    ]


def test_partials_and_bound_methods_run(kernel: Kernel) -> None:
    kernel.ok("""
    from functools import partial

    class Trainer:
        def __init__(self, rate):
            self.rate = rate
        def fit(self, steps, *, scale=1):
            return self.rate * steps * scale

    bound = notebook_launcher(Trainer(0.5).fit, (4,), num_processes=2)
    filled = notebook_launcher(partial(Trainer(2).fit, scale=10), (3,), num_processes=2)
    """)
    assert kernel.value("[bound, filled]") == [2.0, 60]


def test_an_edited_function_is_the_one_that_runs(kernel: Kernel) -> None:
    for version in (1, 2):
        kernel.ok(f"""
        def helper():
            return {version}
        def edited():
            return helper() * 10
        version = notebook_launcher(edited, num_processes=2)
        """)
        assert kernel.value("version") == version * 10


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_a_queue_among_the_arguments_brings_back_what_workers_put(kernel: Kernel, context: str) -> None:
    kernel.ok(f"""
    import multiprocessing, os
    queue = multiprocessing.get_context({context!r}).Queue()

    def put(queue):
        queue.put(int(os.environ["RANK"]))

    notebook_launcher(put, (queue,), num_processes=2)
    got = sorted(queue.get(timeout=10) for _ in range(2))
    """)
    assert kernel.value("got") == [0, 1]


def test_a_queue_of_torch_brings_tensors(kernel: Kernel) -> None:
    kernel.ok("""
    import os, torch
    torch_queue = torch.multiprocessing.Queue()
    taken = torch.multiprocessing.Event()

    def put(queue, taken):
        queue.put(torch.full((3,), float(os.environ["RANK"])))
        taken.wait(20)

    run = launch(put, (torch_queue, taken), num_processes=2)
    got = sorted(torch_queue.get(timeout=20).tolist() for _ in range(2))
    taken.set()
    run.wait()
    """)
    assert kernel.value("got") == [[0.0] * 3, [1.0] * 3]


def test_tensors_in_shared_memory_are_the_same_memory_everywhere(kernel: Kernel) -> None:
    kernel.ok("""
    import os, torch
    board = torch.zeros(4).share_memory_()
    model = torch.nn.Linear(2, 2).share_memory()

    def write(passed):
        rank = int(os.environ["RANK"])
        passed[rank] = rank + 1
        board[rank + 2] = rank + 3
        if rank == 0:
            with torch.no_grad():
                model.weight.fill_(5)

    notebook_launcher(write, (board,), num_processes=2)
    """)
    assert kernel.value("board.tolist()") == [1, 2, 3, 4]
    assert kernel.value("model.weight.tolist()") == [[5, 5], [5, 5]]


UNPICKLABLE = {
    "lock": ("__import__('threading').Lock()", "_thread.lock"),
    "log_file": ("open('kept.log', 'w')", "TextIOWrapper"),
    "batches": ("(number for number in range(3))", "generator"),
}


@pytest.mark.parametrize("name", UNPICKLABLE)
def test_what_cannot_travel_is_named_with_its_type_and_the_cell_that_captures_it(kernel: Kernel, name: str) -> None:
    made, type_name = UNPICKLABLE[name]
    cell = kernel.run(f"""
    {name} = {made}
    def stuck():
        def inner():
            return {name}
        return inner()
    notebook_launcher(stuck, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "PayloadError"
    assert f"'{name}'" in cell.error.text
    assert type_name in cell.error.text
    assert f"by 'stuck' in Cell In[{cell.number}], line 2" in cell.error.text
    assert len(cell.error.traceback.splitlines()) < 40


def test_what_cannot_travel_is_found_inside_of_what_is_captured(kernel: Kernel) -> None:
    cell = kernel.run("""
    import threading
    class Holder:
        def __init__(self):
            self.settings = {"guard": threading.Lock()}
    holder = Holder()
    notebook_launcher(lambda: holder, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "PayloadError"
    for part in ("holder", ".settings", "guard", "_thread.lock", f"Cell In[{cell.number}], line 6"):
        assert part in cell.error.text


def test_what_cannot_travel_is_named_among_the_arguments(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(print, (1, (number for number in range(3))), num_processes=2)")
    assert cell.error is not None
    assert cell.error.name == "PayloadError"
    assert "'args[1]', a generator" in cell.error.text


def test_an_error_of_the_payload_leaves_the_kernel_able_to_launch(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(print, ((number for number in range(3)),), num_processes=2)")
    assert cell.error is not None
    assert kernel.ok("notebook_launcher(lambda: print('fine'), num_processes=2)").stdout.count("fine") == 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_functions_of_cells_run_with_each_start_method(kernel: Kernel, method: str) -> None:
    kernel.ok(f"""
    import os
    class Offset:
        value = 4
    def shifted(number):
        return Offset.value + number + int(os.environ["RANK"])
    shifted_all = notebook_launcher(shifted, (1,), num_processes=2, start_method={method!r}, results="all")
    """)
    assert kernel.value("shifted_all") == [5, 6]
