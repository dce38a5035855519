"""A launch with DeepSpeed: its settings, what its loggers say, and a rank that fails or hangs."""

import json
import logging
import os
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator, launch
from accelerate_nb.errors import WorkerError
from accelerate_nb.utils import DeepSpeedPlugin
from tests.ranks import run_on_ranks
from tests.waiting import until

SETTINGS: dict[str, Any] = {"config_file": "", "cpu": True, "strategy": "deepspeed", "results": "all", "panel": "off"}


def trained(happens: Callable[[], Any] = int) -> list[Any]:
    """A training on whose last rank something happens between a backward and a step."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4))
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.is_last_process:
            happens()
        optimizer.step()
        optimizer.zero_grad()
    clipping = accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"]
    return [accelerator.distributed_type.value, model.zero_optimization_stage(), clipping, loss.item()]


def start(function: Any, *args: Any, folder: Path, **settings: Any) -> Any:
    return launch(function, args, **SETTINGS, **{"num_processes": 2, "folder": str(folder), **settings})


# as Python filters by itself, and pytest does not
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("config", "trained_with"),
    [
        ({"zero_stage": 3, "gradient_clipping": 0.5}, ["DEEPSPEED", 3, 0.5]),
        ({"deepspeed_config_file": "ds_config.json"}, ["DEEPSPEED", 1, 1.0]),
    ],
)
def test_a_launch_trains_by_its_settings_or_a_file_and_prints_nothing_of_its_own(
    config: dict[str, Any], trained_with: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    Path("ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, **values}))
    run = start(trained, folder=tmp_path / "runs", deepspeed_config=config)
    assert [result[:3] for result in run.wait(110)] == [trained_with] * 2
    assert [run.logs(rank) for rank in (0, 1)] == ["", ""]


def raises() -> None:
    raise ValueError("enough")


def hangs() -> None:
    time.sleep(600)


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 1 stopped with ValueError: enough") as caught:
        start(trained, raises, folder=tmp_path, deepspeed_config={"zero_stage": 3}).wait(110)
    # the other one waits for it in a collective of the engine, and is not to blame
    assert "rank 0 " in str(caught.value)


def test_a_hang_is_reported_with_the_stack_of_every_rank(tmp_path: Path) -> None:
    run = start(trained, hangs, folder=tmp_path, deepspeed_config={"zero_stage": 3}, hang_warning_after=2)
    # a busy machine may be silent for as long before the training begins, which is reported, too
    until(lambda: run.view.idle_warning is not None and "rank 0 waits in" in run.view.idle_warning.text, run, 110)
    text, stacks = run.view.idle_warning.text, run.stacks()
    run.stop(timeout=0)
    assert "rank 1 is elsewhere" in text
    assert "in hangs" in stacks


def said_at(level: str) -> str:
    os.environ["ACCELERATE_LOG_LEVEL"] = level
    Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())
    logger, written = logging.getLogger("DeepSpeed"), StringIO()
    logger.handlers[0].setStream(written)  # type: ignore[attr-defined]  # a StreamHandler
    logger.debug("too much")
    logger.info("of interest")
    return written.getvalue()


def test_its_logger_prints_as_much_as_the_variable_wants() -> None:
    (said,) = run_on_ranks(said_at, 1, "INFO")
    assert "of interest" in said
    assert "too much" not in said
