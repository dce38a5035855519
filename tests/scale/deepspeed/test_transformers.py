"""Models of transformers with DeepSpeed: its `Trainer(deepspeed=...)`, weights that are in parts from the beginning, generation."""

import os
from typing import Any

import pytest
import torch

from tests.hf_suite.alias import install
from tests.ranks import run_on_ranks

LIMIT = 110.0
SAMPLES, AT_ONCE, STEPS = 64, 8, 12
CONFIG: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "reduce_bucket_size": "auto",
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}


def tiny_gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )
    )


def counting(samples: int = SAMPLES) -> list[torch.Tensor]:
    start = torch.randint(0, 64, (samples, 1), generator=torch.Generator().manual_seed(0))
    return list((start + torch.arange(12)) % 64)


def by_the_trainer(folder: str) -> dict[str, Any]:
    install()
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=AT_ONCE // int(os.environ["WORLD_SIZE"]),
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        deepspeed=CONFIG,
    )
    trainer = Trainer(tiny_gpt(), arguments, train_dataset=[{"input_ids": item, "labels": item} for item in counting()])
    trainer.train()
    trainer.save_model(f"{folder}/final")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    engine = trainer.model_wrapped
    return {
        "world": trainer.accelerator.num_processes,
        "losses": losses,
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "stage": engine.zero_optimization_stage(),
        "steps": trainer.state.global_step,
    }


@pytest.mark.timeout(240)
def test_the_trainer_learns_with_a_configuration(tmp_path: Any) -> None:
    found, other = run_on_ranks(by_the_trainer, 2, str(tmp_path), limit=200)
    assert (found["world"], found["stage"], found["steps"]) == (2, 3, STEPS)
    assert found["losses"][-1] < 0.7 * found["losses"][0]
    assert found["losses"] == other["losses"]
    assert all(norm > 0 for norm in found["norms"])
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(tmp_path / "final")
    batch = torch.stack(counting(8))
    assert model(input_ids=batch, labels=batch).loss.item() < 0.7 * found["losses"][0]


def in_parts() -> dict[str, Any]:
    from accelerate_nb import Accelerator
    from accelerate_nb.utils import DeepSpeedPlugin

    # whatever Accelerate's own package keeps of a configuration stays as it is
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    from transformers import AutoModelForCausalLM

    whole = tiny_gpt()
    config = whole.config
    model = AutoModelForCausalLM.from_config(config)
    found = {"made": sum(weight.numel() for weight in model.parameters())}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(counting(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
    # ranks generate texts of different lengths, and gather weights together all the same
    prompt = torch.arange(2 + accelerator.process_index).unsqueeze(0)
    with torch.no_grad():
        text = accelerator.unwrap_model(model).generate(
            prompt, max_new_tokens=4 + 2 * accelerator.process_index, do_sample=False, synced_gpus=True, pad_token_id=0
        )
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        whole.load_state_dict(weights)
        with torch.no_grad():
            alone = whole.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=False, pad_token_id=0)
        found["same"] = torch.equal(alone, text)
    found["length"] = text.shape[1]
    accelerator.end_training()
    return found


def test_models_are_made_in_parts_and_generate_with_them() -> None:
    found, other = run_on_ranks(in_parts, 2, limit=LIMIT)
    assert found["made"] == other["made"] == 0
    assert found["same"]
    assert (found["length"], other["length"]) == (6, 9)
