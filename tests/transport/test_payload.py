"""Multiprocessing's queues, locks and shared memory mean the same thing in a worker as here."""

import multiprocessing
import os
import sys
from multiprocessing.context import get_spawning_popen

import pytest
import torch

from accelerate_nb import launch
from accelerate_nb.errors import NeedsForkError
from accelerate_nb.transport.payload import FunctionCall, pack, received_payload
from tests.waiting import until

SPAWN = multiprocessing.get_context("spawn")


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_shared_tensors_are_the_same_memory_after_their_way():
    before = open_descriptors()
    shared, private = torch.zeros(4).share_memory_(), torch.zeros(4)
    packed = pack(FunctionCall(list, ((shared, shared[1:], private),)))
    found = received_payload(packed.descriptors[0], packed.descriptors[1:]).unpack()()
    found[0][2] = 5
    found[2][2] = 5
    assert shared[2] == 5
    assert found[1][1] == 5
    assert private[2] == 0
    packed.close()
    del found, shared
    # torch keeps one for its own book of shared memory; threads of other tests may have some for a moment
    until(lambda: open_descriptors() <= before + 1)


def test_what_only_a_fork_can_inherit_is_an_error():
    with pytest.raises(NeedsForkError, match="Lock made by multiprocessing's 'fork' context") as caught:
        pack(FunctionCall(print, (multiprocessing.get_context("fork").Lock(),)))
    assert "get_context('spawn')" in str(caught.value)
    # nothing else is taken for a process being spawned afterwards
    assert get_spawning_popen() is None


def test_an_exit_with_any_object_as_its_code_stays_an_exit():
    with pytest.raises(SystemExit) as caught:
        FunctionCall(sys.exit, ({"loss": 1},))()
    assert caught.value.code == {"loss": 1}
    assert FunctionCall(sys.exit, (0,))() is None


def adds(queue, lock, event, counter, connection, shared):
    with lock:
        counter.value += 1
    shared += 1
    rank = int(os.environ["RANK"])
    queue.put(rank)
    if rank == 0:
        connection.send("from 0")
    assert event.wait(30)
    return rank


@pytest.mark.parametrize("start_method", ["supervisor", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_use_the_notebook_s_queues_locks_and_shared_tensors(start_method, tmp_path):
    context = SPAWN if start_method != "fork" else multiprocessing.get_context("fork")
    queue, lock, event, counter = context.SimpleQueue(), context.Lock(), context.Event(), context.Value("i", 0)
    test_end, worker_end = context.Pipe()
    shared = torch.zeros(3).share_memory_()
    settings = {"num_processes": 2, "cpu": True, "start_method": start_method, "folder": str(tmp_path), "timeout": 60}
    run = launch(adds, (queue, lock, event, counter, worker_end, shared), results="all", config_file="", **settings)
    assert sorted([queue.get(), queue.get()]) == [0, 1]
    assert test_end.recv() == "from 0"
    event.set()
    assert run.wait() == [0, 1]
    assert counter.value == 2
    assert float(shared[0]) in {1, 2}  # two that add at once may overwrite each other
    for end in (test_end, worker_end):
        end.close()
    queue.close()


def many(tensors):
    for tensor in tensors:
        tensor.fill_(1)


def test_a_model_with_hundreds_of_shared_parameters_is_trained_in_place(tmp_path):
    tensors = [torch.zeros(2).share_memory_() for _ in range(400)]
    launch(many, (tensors,), num_processes=1, cpu=True, folder=str(tmp_path), timeout=60, config_file="").wait()
    assert all(tensor[0] == 1 for tensor in tensors)
