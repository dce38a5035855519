"""Processes that do not save the same way, or not all, are neither left waiting nor taken for a whole checkpoint."""

import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import saver, writer
from accelerate_nb.runtime.world.world import World
from tests.peers import Peer, under_both
from tests.ranks import RanksFailed, rank_variables, run_on_ranks
from tests.runtime.checkpoints.test_kills import fill, make_deadly, training


def each_in_a_folder_of_its_own(peer: Peer) -> Any:
    if peer.is_ours:
        saver.SETTLE = 0.5
    accelerator = peer.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(32), batch_size=4))
    rank = accelerator.process_index
    found, texts = [], []
    for turn in range(2):
        torch.manual_seed(10 * turn + rank)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loader:
                break
            accelerator.save_state(folder)
            names = {path.name for path in Path(folder).iterdir()} - {"checkpoint.json", f"positions_{rank}.pkl"}
            drawn = torch.rand(3).tolist()
            accelerator.load_state(folder)
            found.append((sorted(names), drawn == torch.rand(3).tolist()))
            texts += [str(item.message) for item in caught if "on the main process" in str(item.message)]
        left = [path.name for path in Path(folder).parent.glob(f".{Path(folder).name}*")]
        assert left == []
    accelerator.wait_for_everyone()
    return found, len(texts)


def test_ranks_that_save_to_folders_of_their_own_have_their_own_files_there(tmp_path: Path) -> None:
    both = under_both(each_in_a_folder_of_its_own, 2)
    assert [found for found, _ in both.ours] == [found for found, _ in both.theirs]
    assert [count for _, count in both.ours] == [0, 2]


def makes_its_accelerator_late(folder: str) -> list[str]:
    """Rank 1 begins to make its `Accelerator` when rank 0 has begun to save."""
    saver.SETTLE = 0.5
    is_late, make = os.environ["RANK"] == "1", saver.SaveChannel.__init__

    def make_late(channel: saver.SaveChannel, world: World) -> None:
        store = PrefixStore("accelerate_nb/checkpoint", world.store.clone())
        while is_late and not store.add("saves", 0):
            time.sleep(0.01)
        make(channel, world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver.SaveChannel, "__init__", make_late)
        accelerator = Accelerator(cpu=True)
    own = Path(folder) / f"of rank {accelerator.process_index}"
    for turn in range(2):
        accelerator.save_state(own / str(turn))
    accelerator.wait_for_everyone()
    return sorted(path.name for path in own.iterdir())


def test_a_rank_that_makes_its_accelerator_late_has_its_part_in_every_save(tmp_path: Path) -> None:
    assert run_on_ranks(makes_its_accelerator_late, 2, str(tmp_path)) == [["0", "1"]] * 2


def main_process_first_saves_another(folder: str, blocking: bool) -> list[str]:
    accelerator, model = training(folder, False)
    accelerator.backward(model(torch.ones(1, 4)).sum())  # after the first one DDP exchanges the order of its buckets
    if accelerator.is_main_process:
        accelerator.save_state(f"{folder}/best", blocking=blocking)
    accelerator.save_state(f"{folder}/last", blocking=blocking)
    accelerator.save_state(f"{folder}/last", blocking=blocking)
    accelerator.wait_for_checkpoint()
    accelerator.wait_for_everyone()
    return sorted(path.name for path in Path(folder, "last").iterdir())


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "in the background"])
def test_a_save_of_the_main_process_alone_is_not_taken_for_one_of_all(tmp_path: Path, blocking: bool) -> None:
    first, second = run_on_ranks(main_process_first_saves_another, 2, str(tmp_path), blocking)
    assert first == second
    assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors"} <= set(first)
    best = {path.name for path in (tmp_path / "best").iterdir()}
    assert "random_states_0.pkl" in best
    assert "random_states_1.pkl" not in best


def is_late(folder: str) -> tuple[list[str], list[str], list[str]]:
    """Rank 1 comes to a save when the main process has saved twice without it."""
    saver.JOIN_TIMEOUT, saver.SETTLE = 0.2, 0.2
    accelerator, _ = training(folder, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 if accelerator.is_main_process else 0):
            accelerator.save_state(f"{folder}/last")
        accelerator.wait_for_everyone()
        alone = os.listdir(f"{folder}/last")
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            accelerator.save_state(f"{folder}/last")
    accelerator.wait_for_everyone()
    saver.RETURN_TIMEOUT = 30.0
    accelerator.save_state(f"{folder}/next")
    return sorted(alone), sorted(os.listdir(f"{folder}/next")), [str(item.message) for item in caught]


def test_a_save_of_one_rank_names_who_is_missing_and_who_comes_late_takes_part_in_the_next(tmp_path: Path) -> None:
    (alone, first, (warned,)), (found, second, (told,)) = run_on_ranks(is_late, 2, str(tmp_path))
    assert alone == found
    assert "random_states_0.pkl" in alone
    assert "random_states_1.pkl" not in alone
    assert "not on rank 1" in warned
    assert "rank 1 when the others had saved" in told
    assert first == second
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= set(first)
    assert not (tmp_path / "last" / "random_states_1.pkl").exists()


def is_late_to_numbered_saves(folder: str) -> None:
    """Rank 1 comes to the first save when the main process begins the second."""
    saver.JOIN_TIMEOUT, saver.SETTLE = 0.2, 0.5
    accelerator, _ = training(folder, True, None)
    for turn in range(2):
        for _ in range(1 if accelerator.is_main_process else 2 * turn):
            accelerator.save_state()
        accelerator.wait_for_everyone()
    saver.RETURN_TIMEOUT = 30.0
    accelerator.save_state()


def test_a_rank_that_is_late_to_numbered_saves_leaves_those_of_the_main_process_as_they_are(tmp_path: Path) -> None:
    run_on_ranks(is_late_to_numbered_saves, 2, str(tmp_path))
    assert len(list(tmp_path.glob("checkpoints/*/model.safetensors"))) == 3
    has_part = [path.parent.name for path in tmp_path.glob("checkpoints/*/random_states_1.pkl")]
    assert "checkpoint_0" not in has_part
    assert "checkpoint_2" in has_part


# Two programs that load torch on a busy machine.
LIMIT = 240.0
SCRIPT = """
import os, signal, sys
from accelerate_nb.runtime.checkpoints import saver
import torch
from accelerate_nb import Accelerator
from accelerate_nb.errors import CheckpointError

folder, how = sys.argv[1:]
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.save_state(folder + "/first")
accelerator.wait_for_everyone()
saver.JOIN_TIMEOUT = 0.5
if accelerator.is_main_process:
    sys.stdin.readline()  # the other one has ended
    try:
        accelerator.save_state(folder + "/second")
    except CheckpointError as error:
        print(error)
elif how == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "raises":
    raise ValueError("on purpose")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed by a signal")
@pytest.mark.parametrize("how", ["is killed", "raises", "ends"])
def test_a_checkpoint_that_lacks_the_files_of_a_dead_rank_does_not_appear_and_one_of_ranks_that_ended_does(
    tmp_path: Path, how: str
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words, pipe = [sys.executable, "-c", SCRIPT, str(tmp_path), how], subprocess.PIPE
    places = [{**os.environ, **rank_variables(rank, 2, store.port)} for rank in range(2)]
    main, other = (
        subprocess.Popen(words, env=place, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        for place in places
    )
    with main, other:
        try:
            other.wait(LIMIT)
            output, _ = main.communicate("go\n", timeout=LIMIT)
        finally:
            main.kill()
            other.kill()
    assert ("Rank 1 has died before it wrote its files" in output) == (how != "ends") == bool(output)
    assert (tmp_path / "first" / "checkpoint.json").exists()
    assert (tmp_path / "second").exists() == (tmp_path / "second" / "checkpoint.json").exists() == (how == "ends")


def dies_and_is_named(folder: str, who: int) -> str | None:
    accelerator, _ = training(folder, False)
    accelerator.save_state(f"{folder}/last")
    if accelerator.process_index == who:
        make_deadly(saver, "write_files", 1)
    with pytest.raises(CheckpointError) as failure:
        accelerator.save_state(f"{folder}/last")
    Path(folder, f"of rank {accelerator.process_index}").write_text(str(failure.value))
    return str(failure.value)


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_dies_during_a_save_is_named_by_all_others(tmp_path: Path, who: int) -> None:
    with pytest.raises(RanksFailed, match=f"rank {who}: died without a word"):
        run_on_ranks(dies_and_is_named, 3, str(tmp_path), who)
    texts = [path.read_text() for path in tmp_path.glob("of rank *")]
    assert len(texts) == 2
    for text in texts:
        assert f"Rank {who} has died before" in text
    assert (tmp_path / "last" / "checkpoint.json").exists()


def fails_on_one_rank(folder: str, who: int) -> tuple[str, bool, list[str]]:
    accelerator, model = training(folder, False)
    fill(model, 1.0)
    accelerator.save_state(f"{folder}/last")
    if accelerator.process_index == who:
        accelerator.register_save_state_pre_hook(lambda *_: Path("/nowhere/file").write_text(""))
    fill(model, 2.0)
    with pytest.raises(CheckpointError) as failure:
        accelerator.save_state(f"{folder}/last")
    accelerator.wait_for_everyone()
    assert [path.name for path in Path(folder).iterdir()] == ["last"]  # no draft, which may be as large
    accelerator._save_model_state_pre_hook.clear()
    accelerator.load_state(f"{folder}/last")
    is_former = all(bool((parameter == 1.0).all()) for parameter in model.parameters())
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{folder}/last")  # the group of those who save is made anew
    return str(failure.value), is_former, sorted(path.name for path in Path(folder, "last").iterdir())


@pytest.mark.parametrize("who", [0, 1])
def test_a_failed_save_is_an_error_on_every_process_leaves_the_former_one_and_the_next_succeeds(
    tmp_path: Path, who: int
) -> None:
    for rank, (message, is_former, names) in enumerate(run_on_ranks(fails_on_one_rank, 3, str(tmp_path), who)):
        assert "No such file or directory: '/nowhere/file'" in message
        assert ("another process failed" in message) == (rank != who)
        assert is_former
        assert {f"random_states_{rank}.pkl" for rank in range(3)} <= set(names)


def has_no_folder(folder: str) -> str:
    accelerator, _ = training(folder, False)
    Path(folder, "file").touch()
    with pytest.raises(CheckpointError) as failure:
        accelerator.save_state(f"{folder}/file/last")
    return str(failure.value)


def test_a_folder_that_cannot_be_made_is_the_reason_on_every_process(tmp_path: Path) -> None:
    main, other = run_on_ranks(has_no_folder, 2, str(tmp_path))
    reason = main.partition(": ")[2]
    assert "Not a directory" in reason
    assert other == f"{tmp_path}/file/last was not written: another process failed. {reason}"


def is_interrupted(folder: str, who: int) -> tuple[str, str]:
    accelerator, model = training(folder, False)
    accelerator.save_state(f"{folder}/last")
    fill(model, 2.0)
    sync = writer.sync

    def interrupts(path: Path) -> None:
        writer.sync = sync
        raise KeyboardInterrupt

    if accelerator.process_index == who:
        writer.sync = interrupts
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as stopped:
        accelerator.save_state(f"{folder}/last")
    accelerator.save_state(f"{folder}/last")
    return stopped.type.__name__, str(stopped.value)


@pytest.mark.parametrize(("size", "who"), [(1, 0), (2, 0), (2, 1)])
def test_an_interrupt_of_a_save_stays_one_and_the_others_are_not_left_waiting(
    tmp_path: Path, size: int, who: int
) -> None:
    for rank, (name, message) in enumerate(run_on_ranks(is_interrupted, size, str(tmp_path), who)):
        assert name == ("KeyboardInterrupt" if rank == who else "CheckpointError")
        assert ("another process failed. It was interrupted." in message) == (rank != who)


def test_what_another_process_writes_into_the_store_of_saves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "drawn by chance")
    world: Any = SimpleNamespace(store=HashStore(), rank=0)  # what a channel asks of a world that has no group
    plain = PrefixStore("accelerate_nb/checkpoint", world.store)
    channel = saver.SaveChannel(world)
    channel.put("1/over", "fine")
    assert channel.get("1/over") == "fine"
    assert [channel.put("1/1", status) for status in ("joined", "late")] == ["joined", "joined"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "guessed")
    saver.SaveChannel(world).put("1/plan", [])
    plain.set("1/2", "joined")
    plain.set("2/over", plain.get("1/over"))
    for name in ("1/plan", "1/2", "2/over"):
        with pytest.raises(CheckpointError, match="written by a process that is none of the run"):
            channel.get(name)
