"""A prepared loader's epochs are bars of its rank, where that was asked for."""

import pytest
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator, launch
from accelerate_nb.events.event_types import Progress
from accelerate_nb.utils import DataLoaderConfiguration
from tests.runtime.data.loaders import Numbers, Stream


def prepared(*loaders, **config):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    return accelerator.prepare(*loaders)


def test_each_epoch_is_a_bar_that_begins_and_ends(listener, capfd):
    loader = prepared(DataLoader(Numbers(6), 2), progress=True)
    for _ in range(2):
        assert len(list(loader)) == 3
    seen = [(bar.label, bar.done, bar.total, bar.closed) for bar in listener.of(Progress)]
    assert seen == [(f"epoch {number}", done, 3, done == 3) for number in (0, 1) for done in (0, 3)]
    assert {(bar.bar, bar.unit) for bar in listener.of(Progress)} == {("loader 0", "batch")}
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_bars_of_several_loaders_are_distinguished(listener):
    first, second = prepared(DataLoader(Numbers(6), 2), DataLoader(Numbers(4), 2), progress=True)
    for _ in first:
        list(second)
        break
    bars = {(bar.bar, bar.label) for bar in listener.of(Progress)}
    assert bars == {("loader 0", "epoch 0"), ("loader 1", "epoch 0, loader 2")}


def test_an_epoch_that_is_left_ends_where_it_was_left_and_the_rest_of_one_goes_on_in_its_bar(listener):
    loader = prepared(DataLoader(Numbers(8), 2), progress=True)
    batches = iter(loader)
    next(batches), next(batches)
    batches.close()
    assert (listener.of(Progress)[-1].done, listener.of(Progress)[-1].closed) == (1, True)
    assert loader.iteration == 1
    list(Accelerator(cpu=True).skip_first_batches(loader, 3))
    assert [(bar.done, bar.total) for bar in listener.of(Progress)][-2:] == [(3, 4), (4, 4)]


def test_a_loader_without_a_length_has_a_bar_without_a_total_and_nothing_is_sent_unless_requested(listener):
    list(prepared(DataLoader(Numbers(6), 2)))
    assert listener.of(Progress) == []
    list(prepared(DataLoader(Stream(6), 2), progress=True))
    assert (listener.of(Progress)[-1].done, listener.of(Progress)[-1].total) == (3, None)


def test_where_nobody_watches_a_loader_gives_the_same():
    assert [batch.tolist() for batch in prepared(DataLoader(Numbers(4), 2), progress=True)] == [[0, 1], [2, 3]]


def epoch() -> None:
    list(Accelerator().prepare(DataLoader(Numbers(8), 2)))


@pytest.mark.slow
@pytest.mark.parametrize("loader_progress", [True, False])
def test_a_launch_requests_the_bars_of_all_its_loaders(loader_progress):
    settings = {"num_processes": 2, "cpu": True, "config_file": "", "timeout": 60, "panel": "off"}
    run = launch(epoch, **settings, loader_progress=loader_progress)
    run.wait(60)
    bars = [glance.progress.get("loader 0") for glance in run.view.glances()]
    found = [bar and (bar.label, bar.done, bar.total, bar.closed) for bar in bars]
    assert found == [("epoch 0", 2, 2, True) if loader_progress else None] * 2
