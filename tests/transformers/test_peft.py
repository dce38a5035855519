"""Adapters of peft train on a model whose weights are sharded, and are saved as peft saves them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_nb import Accelerator, ParallelismConfig
from tests.hf_suite.alias import under_alias
from tests.ranks import run_on_ranks
from tests.runtime.strategies.tiny_llama import batches, llama

pytest.importorskip("peft")


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found: nn.Module = get_peft_model(llama(), adapters)
    return found


def trained(folder: str, arguments: dict[str, Any], resumes: bool = False) -> dict[str, Any]:
    """Three steps, after the second of which it is saved; or the third alone, from that checkpoint on."""
    from peft import get_peft_model_state_dict

    accelerator = Accelerator(cpu=True, **arguments)
    model = with_adapters()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], 0.2, momentum=0.9)
    optimizer, model = accelerator.prepare(optimizer, model)
    if resumes:
        accelerator.load_state(f"{folder}/checkpoint")
    for number, batch in enumerate(batches()):
        if resumes and number < 2:
            continue
        accelerator.train_step(model, input_ids=batch, labels=batch)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            accelerator.save_state(f"{folder}/checkpoint")
    state = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    to_save = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save, "state_dict": state}
    unwrapped.save_pretrained(f"{folder}/adapters", **to_save)
    accelerator.wait_for_everyone()
    frozen = [weight for weight in unwrapped.parameters() if not weight.requires_grad]
    found = {
        "adapters": dict(get_peft_model_state_dict(unwrapped, state)) if state else {},
        "base": {name: value for name, value in state.items() if "lora" not in name},
        "is_sharded": all(isinstance(weight, DTensor) for weight in unwrapped.parameters()),
        "frozen": len(frozen),
        "gradients": sum(weight.grad is not None for weight in frozen),
    }
    accelerator.end_training()
    return found


@pytest.mark.parametrize(
    ("arguments", "is_sharded"),
    [({"strategy": "fsdp"}, True), ({"parallelism_config": ParallelismConfig(pp_size=2)}, False)],
    ids=["FSDP", "stages"],
)
def test_adapters_end_in_the_weights_of_one_process(arguments: Any, is_sharded: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    (wanted,) = run_on_ranks(under_alias, 1, trained, str(tmp_path / "one"), {})
    folder = str(tmp_path / "spread")
    found = run_on_ranks(under_alias, 2, trained, folder, arguments)
    again = run_on_ranks(under_alias, 2, trained, folder, arguments, True)[0]
    for item in (found[0], again):
        torch.testing.assert_close(item["adapters"], wanted["adapters"], rtol=0, atol=1e-6)
        torch.testing.assert_close(item["base"], wanted["base"], rtol=0, atol=0)
    assert [item["is_sharded"] for item in found] == [is_sharded] * 2
    assert [item["gradients"] for item in found] == [0, 0]
    assert all(item["frozen"] for item in found)
    # what peft saved is what it loads
    loaded = PeftModel.from_pretrained(llama(), f"{folder}/adapters")
    saved = [value for name, value in loaded.state_dict().items() if "lora" in name]
    torch.testing.assert_close(saved, [*wanted["adapters"].values()], rtol=0, atol=1e-6)
