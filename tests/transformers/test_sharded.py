"""`Trainer` with sharded weights has the losses and norms that it has with copies."""

import os
from typing import Any

import pytest
import torch

from tests.hf_suite.alias import under_alias
from tests.ranks import run_on_ranks
from tests.runtime.strategies.tiny_llama import llama

pytest.importorskip("transformers")


def history(
    folder: str, sharded: bool, resumes: bool = False, form: str = "FULL_STATE_DICT"
) -> tuple[list[float], list[float], str]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from transformers import Trainer, TrainingArguments

    tokens = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(1))
    blocks = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": form}
    settings: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": blocks} if sharded else {}
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=2, max_steps=4, save_steps=2, logging_steps=1,
        report_to=[], optim="sgd", learning_rate=0.1, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = Trainer(llama(), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumes else None)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    strategy = type(trainer.accelerator.strategy).__name__
    return [entry["loss"] for entry in logged], [entry["grad_norm"] for entry in logged], strategy


def test_a_trainer_that_shards_has_the_numbers_of_one_that_copies(tmp_path) -> None:
    copied, sharded = (
        run_on_ranks(under_alias, 2, history, str(tmp_path / str(shards)), shards) for shards in (False, True)
    )
    assert {item[2] for item in copied} == {"DDP"}
    assert {item[2] for item in sharded} == {"FSDP"}
    for number in (0, 1):
        assert sharded[0][number] == pytest.approx(copied[0][number], abs=1e-6)


@pytest.mark.parametrize(
    ("form", "file"),
    [("FULL_STATE_DICT", "pytorch_model_fsdp.bin"), ("SHARDED_STATE_DICT", "pytorch_model_fsdp_0/.metadata")],
)
def test_a_trainer_that_shards_goes_on_from_its_checkpoint(tmp_path, form: str, file: str) -> None:
    first, again = (
        run_on_ranks(under_alias, 2, history, str(tmp_path), True, resumes, form)[0] for resumes in (False, True)
    )
    assert (tmp_path / "checkpoint-2" / file).is_file()
    for number in (0, 1):
        assert again[number] == pytest.approx(first[number], abs=1e-6)
