"""A kill at any moment of an engine's save leaves a whole checkpoint: the former one, or the new one."""

from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator
from accelerate_nb.runtime.checkpoints import folders, writer
from accelerate_nb.runtime.strategies.deepspeed import checkpoint
from accelerate_nb.utils import DeepSpeedPlugin
from tests.ranks import RanksFailed, run_on_ranks
from tests.runtime.checkpoints.test_kills import make_deadly
from tests.scale.deepspeed.zero import LIMIT

# Each moment: the module and the name of what is called then, at which call, on which rank, and whether the save returns at once.
MOMENTS = {
    "before an engine gives its state": (checkpoint, "_engines", 1, 1, True),
    "while the other rank's part is written": (writer, "sync", 1, 1, True),
    "while parts are written in the background": (writer, "sync", 2, 0, False),
    "before the new one is there": (folders, "commit", 1, 0, True),
    "when the new one is there": (folders, "_clear_former", 1, 0, True),
}


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 6)).square().mean()


def losses_by_hand(count: int) -> list[float]:
    """The losses of so many steps, of one process."""
    model, optimizer = net()
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Training:
    """An engine of stage 3, and steps to take with it."""

    def __init__(self) -> None:
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
        self.accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        self.model, self.optimizer = self.accelerator.prepare(*net())

    def step(self) -> float:
        loss = loss_of(self.model)
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss.item()


def saves_and_dies(folder: str, moment: str) -> None:
    training = Training()
    training.step()
    training.accelerator.save_state(folder)
    training.step()
    module, name, call, rank, blocking = MOMENTS[moment]
    if training.accelerator.process_index == rank:
        make_deadly(module, name, call)
    training.accelerator.save_state(folder, blocking=blocking)
    training.accelerator.wait_for_checkpoint()


def finds(folder: str) -> list[float]:
    """The losses of the next two steps."""
    training = Training()
    training.accelerator.load_state(folder)
    training.accelerator.save_state(folder)  # what was left half-way is in nobody's way
    return [training.step(), training.step()]


@pytest.mark.parametrize(
    "moment",
    [pytest.param(moment, marks=() if "other rank's" in moment else pytest.mark.slow) for moment in MOMENTS],
)
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path, moment: str) -> None:
    folder = str(tmp_path / "checkpoint")
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_on_ranks(saves_and_dies, 2, folder, moment, limit=LIMIT)
    saved_after = 2 if moment == "when the new one is there" else 1
    for found in run_on_ranks(finds, 2, folder, limit=LIMIT):
        assert found == pytest.approx(losses_by_hand(saved_after + 2)[saved_after:], rel=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
