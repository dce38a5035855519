"""What takes the place of "auto" when objects are prepared is what Accelerate puts there, key by key."""

import json
import os
from contextlib import suppress
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.peers import Peer
from tests.ranks import run_on_ranks
from tests.scale.deepspeed.zero import AUTO

FILE: dict[str, Any] = {
    **AUTO,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
WARMUP = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    }
}
ZERO_2 = {"zero_optimization": {"stage": 2}}
OF_LOADERS = ZERO_2 | {"train_micro_batch_size_per_gpu": "auto"}
# Settings of the plugin, of the Accelerator, and of the objects.
TABLE: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"zero_stage": 2}, {}, {}),
    ({"zero_stage": 3, "gradient_clipping": 0.5}, {"gradient_accumulation_steps": 4}, {}),
    ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}, {}),
    ({"hf_ds_config": FILE}, {"gradient_accumulation_steps": 3}, {"hidden_size": 32}),
    ({"hf_ds_config": FILE}, {}, {"hidden_sizes": [8, 64]}),
    ({"hf_ds_config": FILE}, {}, {}),
    ({"hf_ds_config": FILE | ADAMW | WARMUP}, {}, {"hidden_size": 16, "optimizer": "dummy", "scheduler": "dummy"}),
    ({"hf_ds_config": FILE | ADAMW}, {}, {"hidden_size": 16, "optimizer": "dummy", "scheduler": "callable"}),
    ({"hf_ds_config": FILE | ADAMW}, {}, {"hidden_size": 16}),
    ({"hf_ds_config": FILE | WARMUP}, {"split_batches": True}, {"hidden_size": 16, "scheduler": "dummy"}),
    ({"hf_ds_config": FILE | WARMUP}, {}, {"hidden_size": 16, "scheduler": "torch"}),
    ({"hf_ds_config": FILE}, {}, {"hidden_size": 16, "optimizer": "dummy"}),
    ({"hf_ds_config": FILE}, {}, {"hidden_size": 16, "scheduler": "dummy"}),
    ({"hf_ds_config": ZERO_2}, {"gradient_accumulation_steps": 2}, {}),
    ({"hf_ds_config": OF_LOADERS}, {}, {"batches": [4, 8]}),
    ({"hf_ds_config": OF_LOADERS, "is_train_batch_min": False}, {}, {"batches": [4, 8]}),
    ({"hf_ds_config": OF_LOADERS}, {}, {"batches": []}),
    ({"hf_ds_config": ZERO_2 | {"train_micro_batch_size_per_gpu": 6}}, {}, {"batches": []}),
    ({"zero_stage": 1}, {"mixed_precision": "bf16"}, {}),
    ({"hf_ds_config": ZERO_2 | {"bf16": {"enabled": "auto"}}}, {"mixed_precision": "bf16"}, {"batches": [2]}),
    ({"hf_ds_config": ZERO_2 | {"fp16": {"enabled": True}}}, {"mixed_precision": "bf16"}, {"batches": [2]}),
]


class _Captured(Exception):
    """The engine was to be made of this configuration."""


def configurations(peer: Peer) -> list[str]:
    import deepspeed

    def capture(*, config: Any = None, config_params: Any = None, **_: Any) -> None:
        raise _Captured(json.dumps(config or config_params, sort_keys=True))

    deepspeed.initialize = capture
    # Accelerate would have it compiled, which takes longer than all the rest
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = []
    for row in TABLE:
        try:
            found.append(_configuration(peer, *deepcopy(row)))
        except ValueError:
            found.append("refused")
        with suppress(AttributeError):
            peer.door("state").AcceleratorState._reset_state(True)
    return found


def _configuration(peer: Peer, plugin: dict[str, Any], settings: dict[str, Any], objects: dict[str, Any]) -> str:
    utils = peer.door("utils")
    if (split := settings.pop("split_batches", None)) is not None:
        settings["dataloader_config"] = utils.DataLoaderConfiguration(split_batches=split)
    accelerator = peer.Accelerator(deepspeed_plugin=utils.DeepSpeedPlugin(**plugin), **settings)
    model = nn.Linear(2, 2)
    sizes = {name: objects[name] for name in ("hidden_size", "hidden_sizes") if name in objects}
    if sizes:
        model.config = SimpleNamespace(**sizes)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    if objects.get("optimizer") == "dummy":
        optimizer = utils.DummyOptim(model.parameters(), lr=0.03, weight_decay=0.2)
    schedules: dict[str, Any] = {
        "dummy": lambda: utils.DummyScheduler(optimizer, total_num_steps=101, warmup_num_steps=0),
        "callable": lambda: utils.DummyScheduler(optimizer, lr_scheduler_callable=print),
        "torch": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    given = [model, optimizer, *(schedules[name]() for name in filter(None, [objects.get("scheduler")]))]
    given += [DataLoader(torch.zeros(16, 2), batch_size=size) for size in objects.get("batches", [4])]
    try:
        accelerator.prepare(*given)
    except _Captured as captured:
        return str(captured)
    return "nothing was made"


def of_theirs() -> list[str]:
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    os.environ["MASTER_PORT"] = "0"
    return configurations(Peer("accelerate"))


def of_ours() -> list[str]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return configurations(Peer("accelerate_nb"))


def test_values_take_the_place_of_auto_as_in_accelerate() -> None:
    (theirs,), (ours,) = run_on_ranks(of_theirs, 1), run_on_ranks(of_ours, 1)
    assert "nothing was made" not in theirs
    assert theirs.count("refused") == 7
    for row, mine, other in zip(TABLE, ours, theirs, strict=True):
        assert mine == other, row
