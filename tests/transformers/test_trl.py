"""trl's trainer for supervised fine-tuning runs on this package's `Accelerator`, with copies and with sharded weights."""

import os
from typing import Any

import pytest
import torch

from tests.hf_suite.alias import under_alias
from tests.ranks import run_on_ranks
from tests.runtime.strategies.tiny_llama import llama

pytest.importorskip("trl")


def history(folder: str, is_sharded: bool) -> tuple[list[float], str]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
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
    sharding: dict[str, Any] = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    settings: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": sharding} if is_sharded else {}
    arguments = SFTConfig(
        folder, use_cpu=True, per_device_train_batch_size=2, max_steps=4, logging_steps=1, report_to=[], optim="sgd",
        learning_rate=0.1, disable_tqdm=True, save_strategy="no", max_length=16, gradient_checkpointing=False, bf16=False,
        **settings,
    )  # fmt: skip
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
    copied, sharded = (
        run_on_ranks(under_alias, 2, history, str(tmp_path / str(shards)), shards) for shards in (False, True)
    )
    assert [item[1].split(".")[-1] for item in copied] == ["ddp", "ddp"]
    assert "fsdp" in sharded[0][1]
    assert len(copied[0][0]) == 4
    assert copied[0][0][-1] < copied[0][0][0]
    assert sharded[0][0] == pytest.approx(copied[0][0], abs=1e-4)
