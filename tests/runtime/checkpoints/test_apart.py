"""Processes that do not save the same way, or not all, are neither left waiting nor taken for a whole checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import commit_protocol
from accelerate_nb.runtime.world.world import World
from tests.peers import Peer, under_both
from tests.ranks import run_on_ranks
from tests.runtime.checkpoints.test_kills import training


def each_in_a_folder_of_its_own(peer: Peer) -> Any:
    """As Accelerate's own test of stateful loaders does it."""
    if peer.is_ours:
        commit_protocol.SETTLE = 0.5
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
    commit_protocol.SETTLE = 0.5
    is_late, make = os.environ["RANK"] == "1", commit_protocol.CommitChannel.__init__

    def make_late(channel: commit_protocol.CommitChannel, world: World) -> None:
        store = PrefixStore("accelerate_nb/checkpoint", world.store.clone())
        while is_late and not store.add("saves", 0):
            time.sleep(0.01)
        make(channel, world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_protocol.CommitChannel, "__init__", make_late)
        accelerator = Accelerator(cpu=True)
    own = Path(folder) / f"of rank {accelerator.process_index}"
    for turn in range(2):
        accelerator.save_state(own / str(turn))
    accelerator.wait_for_everyone()
    return sorted(path.name for path in own.iterdir())


def test_a_rank_that_makes_its_accelerator_late_has_its_part_in_every_save(tmp_path: Path) -> None:
    assert run_on_ranks(makes_its_accelerator_late, 2, str(tmp_path)) == [["0", "1"]] * 2


def main_process_first_saves_another(folder: str, blocking: bool) -> list[str]:
    accelerator, _ = training(folder, False)
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


def hears_late_that_a_save_is_over(folder: str) -> list[str]:
    accelerator, _ = training(folder, False)
    finish = commit_protocol.OtherProcessCommit.finish

    def late(following: Any, complaint: str | None, commit: Any) -> None:
        finish(following, complaint, commit)
        threading.Event().wait(1)  # the main process drafts its next save meanwhile

    commit_protocol.OtherProcessCommit.finish = late  # type: ignore[method-assign]
    for _ in range(3):
        accelerator.save_state(f"{folder}/last")
    accelerator.wait_for_everyone()
    return sorted(path.name for path in Path(folder, "last").iterdir())


@pytest.mark.slow
def test_a_process_that_learns_late_of_a_save_leaves_the_next_draft_alone(tmp_path: Path) -> None:
    first, second = run_on_ranks(hears_late_that_a_save_is_over, 2, str(tmp_path))
    assert first == second
    assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors"} <= set(first)


def counts_differ(folder: str) -> list[str]:
    """Ranks that have had different numbers of batches, and different numbers of saves."""
    commit_protocol.JOIN_TIMEOUT = 0.2
    accelerator, _ = training(folder, False)
    if accelerator.is_main_process:
        accelerator.save_state(f"{folder}/saved")
    accelerator.wait_for_everyone()
    accelerator.step = 10 - accelerator.process_index
    accelerator.save_state(f"{folder}/saved")
    return sorted(path.name for path in Path(folder, "saved").iterdir())


def test_ranks_at_different_steps_save_one_checkpoint(tmp_path: Path) -> None:
    for found in run_on_ranks(counts_differ, 2, str(tmp_path)):
        assert "random_states_1.pkl" in found


SCRIPT = """
import os, signal, sys
from accelerate_nb.runtime.checkpoints import commit_protocol
commit_protocol.JOIN_TIMEOUT = 0.5
import torch
from accelerate_nb import Accelerator
from accelerate_nb.errors import CheckpointError

folder, how = sys.argv[1:]
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.save_state(folder + "/first")
accelerator.wait_for_everyone()
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


def runs_with_a_rank_that(how: str, folder: Path) -> str:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    main, other = (
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), how],
            env={**os.environ, **environment, "RANK": rank, "LOCAL_RANK": rank},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in "01"
    )
    with main, other:
        try:
            other.wait(60)
            output, _ = main.communicate("go\n", timeout=60)
        finally:
            main.kill()
            other.kill()
    return output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed by a signal")
@pytest.mark.parametrize("how", ["is killed", "raises"])
def test_a_checkpoint_that_lacks_the_files_of_a_dead_rank_does_not_appear(tmp_path: Path, how: str) -> None:
    assert "Rank 1 has died before it wrote its files" in runs_with_a_rank_that(how, tmp_path)
    assert (tmp_path / "first" / "checkpoint.json").exists()
    assert not (tmp_path / "second").exists()


@pytest.mark.slow
def test_a_main_process_may_save_when_the_others_have_ended_in_peace(tmp_path: Path) -> None:
    assert runs_with_a_rank_that("ends", tmp_path) == ""
    assert (tmp_path / "second" / "checkpoint.json").exists()


def test_what_another_process_writes_into_the_store_of_saves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "drawn by chance")
    plain = HashStore()
    store = commit_protocol.SignedStore(plain)
    store.set("1/verdict", "fine")
    assert (store.get("1/verdict"), store.set_first("1/1", "joined"), store.set_first("1/1", "late")) == (
        "fine",
        "joined",
        "joined",
    )
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "guessed")
    commit_protocol.SignedStore(plain).set("1/open", "{}")
    plain.set("1/2", "joined")
    plain.set("2/verdict", plain.get("1/verdict"))
    for name in ("1/open", "1/2", "2/verdict"):
        with pytest.raises(CheckpointError, match="written by a process that is none of the run"):
            store.get(name)
