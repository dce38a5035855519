"""`Trainer`, and trl's for supervised fine-tuning, have with sharded weights the losses that they have with copies."""

from typing import Any

import pytest
import torch

from tests.hf_suite.alias import under_alias
from tests.ranks import run_on_ranks
from tests.runtime.strategies.tiny_llama import llama

pytest.importorskip("transformers")
OPTIONS: dict[str, Any] = {
    "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1, "report_to": [], "optim": "sgd",
    "learning_rate": 0.1, "disable_tqdm": True,
}  # fmt: skip


def sharding(is_sharded: bool, **more: str) -> dict[str, Any]:
    blocks = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **more}
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": blocks} if is_sharded else {}


def history(
    folder: str, sharded: bool, resumes: bool = False, form: str = "FULL_STATE_DICT"
) -> tuple[list[float], list[float], str]:
    from transformers import Trainer, TrainingArguments

    tokens = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(folder, save_steps=2, **OPTIONS, **sharding(sharded, state_dict_type=form))
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


def fine_tuned(folder: str, is_sharded: bool) -> tuple[list[float], str]:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{number}": number for number in range(30)} | {"<pad>": 30, "<end>": 31}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    texts = torch.randint(0, 30, (16, 8), generator=torch.Generator().manual_seed(1)).tolist()
    more = {"save_strategy": "no", "max_length": 16, "gradient_checkpointing": False, "bf16": False}
    arguments = SFTConfig(folder, **OPTIONS, **more, **sharding(is_sharded))
    trainer = SFTTrainer(
        llama(),
        arguments,
        train_dataset=Dataset.from_dict({"text": [" ".join(f"w{number}" for number in text) for text in texts]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, type(trainer.accelerator.strategy).__module__


def test_supervised_fine_tuning_has_the_same_losses_with_copies_and_shards(tmp_path) -> None:
    pytest.importorskip("trl")
    copied, sharded = (
        run_on_ranks(under_alias, 2, fine_tuned, str(tmp_path / str(shards)), shards) for shards in (False, True)
    )
    assert [item[1].split(".")[-1] for item in copied] == ["ddp", "ddp"]
    assert "fsdp" in sharded[0][1]
    assert len(copied[0][0]) == 4
    assert copied[0][0][-1] < copied[0][0][0]
    assert sharded[0][0] == pytest.approx(copied[0][0], abs=1e-4)
