"""Mistakes that are known get a sentence on what to do; the errors here are torch's own, made as people make them."""

import os
import signal
import socket

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate_nb import Accelerator, WorkerError, launch
from accelerate_nb.failures.hints import advice_on, advice_on_death

SETTINGS = {"cpu": True, "config_file": "", "timeout": 60}


class DiesAtOnce(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def cuda_by_name():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    torch.ones(1).cuda()


def fp16_without_its_scale():
    model = torch.nn.Linear(2, 1)
    model(torch.ones(2, 2)).sum().backward()
    torch.amp.GradScaler("cpu").step(torch.optim.SGD(model.parameters(), 0.1))


class StaysHere:
    def __reduce__(self):
        raise AttributeError("Can't pickle local object 'train.<locals>.<lambda>'")


def an_accelerator_of_another_process():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    AcceleratorState()


def a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True)


def batches(data, how, **more):
    return list(DataLoader(data, num_workers=1, multiprocessing_context=how, **more))


RAISED = {
    "an accelerator of another process": (an_accelerator_of_another_process, "in the function that is launched"),
    "another device": (lambda: torch.nn.Linear(2, 2).to("meta")(torch.ones(2, 2)), "accelerator.prepare"),
    "cuda by name": (cuda_by_name, "accelerator.device in place of .cuda()"),
    "fp16 without its scale": (fp16_without_its_scale, "accelerator.backward(loss) in place of loss.backward()"),
    "no graph": (lambda: torch.ones(1).backward(), "depends on nothing that learns"),
    "a petabyte": (lambda: torch.empty(10**15), "memory is full"),
    # a lambda itself is sent where this package has prepared multiprocessing; its words are those of a process that has not
    "a lambda for spawn": (lambda: batches([1], "spawn", collate_fn=StaysHere()), "multiprocessing_context='fork'"),
    "a worker that is killed": (lambda: batches(DiesAtOnce(), "fork"), "loader's worker was ended"),
    "samples of two shapes": (lambda: list(DataLoader([torch.ones(2), torch.ones(3)], batch_size=2)), "pad them"),
    "the length of a stream": (lambda: len(DataLoader(Endless())), "count the batches"),
    "a port that is taken": (a_port_that_is_taken, "Leave out use_port"),
    "no group": (lambda: dist.all_reduce(torch.ones(1)), "Make an Accelerator"),
    "a wrapper's weights": (
        lambda: torch.nn.Linear(1, 1, bias=False).load_state_dict({"module.weight": torch.ones(1, 1)}),
        "unwrap_model",
    ),
}


@pytest.mark.parametrize(("mistake", "advice"), RAISED.values(), ids=RAISED)
def test_a_known_mistake_is_answered(mistake, advice):
    with pytest.raises(Exception) as caught:
        mistake()
    assert advice in advice_on(caught.value)


def unused_weights():
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

        def forward(self, batch):
            return self.used(batch)

    accelerator = Accelerator()
    model = accelerator.prepare(Half())
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 2)).sum())


def an_attribute_of_the_model():
    return Accelerator().prepare(torch.nn.Linear(2, 1)).in_features


def batches_of_two_sizes():
    accelerator = Accelerator()
    return accelerator.gather(torch.ones(3 + accelerator.process_index))


def batches_of_two_sizes_with_torch_alone():
    # gloo ends the process that gets too much, from inside its own thread
    dist.all_reduce(torch.ones(3 + 100_000 * Accelerator().process_index))


def nccl_on_a_cpu():
    if dist.is_nccl_available():
        raise RuntimeError("Distributed package doesn't have NCCL built in")
    dist.init_process_group("nccl")


ON_RANKS = {
    unused_weights: r"find_unused_parameters=True",
    an_attribute_of_the_model: r"accelerator\.unwrap_model\(model\) has",
    batches_of_two_sizes: r"gather_for_metrics and pad_across_processes",
    batches_of_two_sizes_with_torch_alone: r"gather_for_metrics and pad_across_processes",
    nccl_on_a_cpu: r"has no NCCL",
}


@pytest.mark.parametrize("mistake", ON_RANKS)
def test_a_mistake_of_ranks_is_answered_in_the_error(mistake):
    with pytest.raises(WorkerError, match=rf"\n\nWhat to do: [^\n]*{ON_RANKS[mistake]}[^\n]*\n\nAll output") as caught:
        launch(mistake, num_processes=2, **SETTINGS).wait()
    assert any(failure.advice for failure in caught.value.failures)


# What only a GPU says, word for word: torch/cuda/__init__.py, c10/cuda, ProcessGroupNCCL.
ELSEWHERE = {
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB": "smaller batch",
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing": "leave start_method out",
    "CUDA error: device-side assert triggered": "cpu=True",
    "NCCL error in: ProcessGroupNCCL.cpp:2356, unhandled system error": "NCCL_DEBUG=INFO",
    "DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit.": "/dev/shm",
    "DataLoader worker (pid(s) 77, 78) exited unexpectedly": "/dev/shm",
    # libtpu's and torch_xla's, as people report them (pytorch/xla 7227, 9303, 9604; huggingface/transformers 28204)
    "Bad StatusOr access: ABORTED: The TPU is already in use by process with pid 27846.": "Another process has the TPU",
    "Bad StatusOr access: UNKNOWN: TPU initialization failed: open(/dev/vfio/0): Device or resource busy: Device or resource "
    "busy; Couldn't open iommu group /dev/vfio/0": "Another process has the TPU",
    "Bad StatusOr access: UNKNOWN: TPU initialization failed: open(/dev/accel0): Operation not permitted: Operation not "
    "permitted; Couldn't open device: /dev/accel0": "Another process has the TPU",
    "Runtime is already initialized. Do not use the XLA device before calling xmp.spawn.": "leave out xmp.spawn",
    "Bad StatusOr access: UNKNOWN: TPU initialization failed: Invalid --2a886c8_slice_builder_worker_addresses specified. "
    "Expected 4 worker addresses, got 1.": "unset TPU_PROCESS_ADDRESSES",
    "TPU initialization failed: No ba16c7433 device found.": "restart the notebook's machine",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.31G of 15.75G hbm.": "smaller batch",
}


@pytest.mark.parametrize("message", ELSEWHERE)
def test_what_only_an_accelerator_or_a_small_container_reports_has_a_hint(message):
    assert ELSEWHERE[message] in advice_on(RuntimeError(message))


def test_a_cause_and_an_exception_of_a_group_are_answered_too():
    cause = ValueError("no")
    cause.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert "smaller batch" in advice_on(cause)
    group = RuntimeError("several")
    group.exceptions = [KeyError("x"), cause]
    assert "smaller batch" in advice_on(group)


def test_what_is_not_known_gets_no_advice():
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    assert advice_on(first) == ""
    assert advice_on(AttributeError("Can't pickle local object 'f'")) == ""


def test_a_process_that_was_killed_or_touched_memory_that_is_not_there_is_answered():
    assert "memory may be full" in advice_on_death("SIGKILL", [])
    assert "/dev/shm" in advice_on_death("SIGBUS", [])
    assert advice_on_death("SIGSEGV", ["hello"]) == ""
