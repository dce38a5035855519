"""Models of transformers with DeepSpeed: its `Trainer(deepspeed=...)`, weights that are in parts from the beginning, generation."""

import os
from typing import Any

import pytest
import torch

from tests.hf_suite.alias import install
from tests.ranks import run_on_ranks
from tests.scale.deepspeed.zero import AUTO, LIMIT, arguments_of_trainer
from tests.transformers.test_trainer import counting, tiny_gpt

SAMPLES, AT_ONCE, STEPS = 64, 8, 12
CONFIG: dict[str, Any] = {
    **AUTO,
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "reduce_bucket_size": "auto",
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}


def by_the_trainer(folder: str) -> list[float]:
    install()
    from transformers import Trainer

    size = AT_ONCE // int(os.environ["WORLD_SIZE"])
    steps = {"max_steps": STEPS, "per_device_train_batch_size": size, "learning_rate": 1e-2}
    arguments = arguments_of_trainer(folder, deepspeed=CONFIG, **steps)
    samples = [{"input_ids": item, "labels": item} for item in counting(SAMPLES)]
    trainer = Trainer(tiny_gpt(), arguments, train_dataset=samples)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    assert (trainer.accelerator.num_processes, trainer.model_wrapped.zero_optimization_stage()) == (2, 3)
    assert trainer.state.global_step == STEPS
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert all(norm > 0 for norm in norms)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.timeout(240)
def test_the_trainer_learns_with_a_configuration(tmp_path: Any) -> None:
    losses, other = run_on_ranks(by_the_trainer, 2, str(tmp_path), limit=200)
    assert losses[-1] < 0.7 * losses[0]
    assert losses == other
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(tmp_path / "final")
    batch = torch.stack(counting(8))
    assert model(input_ids=batch, labels=batch).loss.item() < 0.7 * losses[0]


def in_parts() -> None:
    from accelerate_nb import Accelerator
    from accelerate_nb.utils import DeepSpeedPlugin

    # whatever Accelerate's own package keeps of a configuration stays as it is
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    from transformers import AutoModelForCausalLM

    whole = tiny_gpt()
    # also after another plugin's block that changes nothing
    with DeepSpeedPlugin(zero_stage=2).zero3_init_context_manager(enable=False):
        pass
    model = AutoModelForCausalLM.from_config(whole.config)
    assert sum(weight.numel() for weight in model.parameters()) == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(counting(SAMPLES), batch_size=4)
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
        assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
        whole.load_state_dict(weights)
        with torch.no_grad():
            alone = whole.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=False, pad_token_id=0)
        assert torch.equal(alone, text)
    assert text.shape[1] == (6, 9)[accelerator.process_index]
    accelerator.end_training()


def test_models_are_made_in_parts_and_generate_with_them() -> None:
    run_on_ranks(in_parts, 2, limit=LIMIT)
