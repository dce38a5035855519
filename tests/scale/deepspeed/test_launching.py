"""A launch with DeepSpeed: its settings, and what its loggers say."""

from __future__ import annotations

import json
import logging
import os
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator, launch
from accelerate_nb.utils import DeepSpeedPlugin
from tests.ranks import run_on_ranks

SETTINGS: dict[str, Any] = {"config_file": "", "cpu": True, "strategy": "deepspeed", "results": "all", "panel": "off"}


def prepared() -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4))


def trained() -> list[Any]:
    accelerator, model, optimizer, loader = prepared()
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    config = accelerator.deepspeed_plugin.deepspeed_config
    return [
        accelerator.distributed_type.value,
        model.zero_optimization_stage(),
        config["gradient_clipping"],
        loss.item(),
    ]


def start(function: Any, *args: Any, folder: Path, **settings: Any) -> Any:
    return launch(function, args, **SETTINGS, **{"num_processes": 2, "folder": str(folder), **settings})


def test_a_launch_trains_by_its_settings_and_prints_nothing_of_its_own(tmp_path: Path) -> None:
    run = start(trained, folder=tmp_path, deepspeed_config={"zero_stage": 3, "gradient_clipping": 0.5})
    results = run.wait(110)
    assert [result[:3] for result in results] == [["DEEPSPEED", 3, 0.5]] * 2
    said = [line for rank in (0, 1) for line in run.logs(rank).splitlines() if line.strip()]
    assert [line for line in said if "DeepSpeed" in line or "INFO" in line] == []


def test_a_launch_trains_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 1},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_clipping": "auto",
            }
        )
    )
    results = start(trained, folder=tmp_path / "runs", deepspeed_config={"deepspeed_config_file": str(path)}).wait(110)
    assert [result[:3] for result in results] == [["DEEPSPEED", 1, 1.0]] * 2


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
