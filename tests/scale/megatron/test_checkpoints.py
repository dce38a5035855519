"""Trainings by Megatron go on from their checkpoints, also in other degrees, on CPUs behind a shim."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from accelerate_nb import Accelerator
from accelerate_nb.utils import MegatronLMPlugin
from tests.scale.megatron.cuda_on_cpu import on_ranks
from tests.scale.megatron.gpt import assert_refused, assert_weights, batches, megatron_gpt, step_on, transformer_config

pytestmark = pytest.mark.timeout(180)

ROUNDING = 1e-6
# Other degrees sum in another order, and AdamW makes steps of what is left of gradients that are zero where it adds less.
ROUNDING_OF_OTHER_DEGREES = 1e-5
EPSILON = 1e-3
BEFORE = 2

WIDTHS, STAGES, COPIES = {"tp_degree": 2}, {"pp_degree": 2}, {"use_distributed_optimizer": True}


class Training:
    """A model, its optimizer and a schedule, prepared on this process; weights differ from those of another seed."""

    def __init__(self, settings: dict[str, Any], *, precision: str = "no", dropout: float = 0.0, seed: int = 5) -> None:
        torch.manual_seed(seed)
        plugin = MegatronLMPlugin(gradient_clipping=0.5, num_micro_batches=2, **settings)
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, megatron_lm_plugin=plugin, step_scheduler_with_optimizer=False
        )
        config = transformer_config(
            self.accelerator.world.mesh,
            num_layers=2,
            hidden_dropout=dropout,
            attention_dropout=dropout,  # of random numbers of Megatron's own
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
        )
        model = megatron_gpt(config, tied=True)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=EPSILON)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)

    def train(self, first: int, last: int) -> None:
        for batch in batches()[first:last]:
            step_on(self.accelerator, self.model, batch)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def end(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.accelerator.get_state_dict(self.model)
        self.accelerator.end_training()
        return state


def whole(settings: dict[str, Any], options: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """A training without a stop, which saves in the middle."""
    training = Training(settings, **options)
    training.train(0, BEFORE)
    training.accelerator.save_state(str(folder))
    training.train(BEFORE, len(batches()))
    return training.end()


def resumed(settings: dict[str, Any], options: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The rest of a training, from its checkpoint, by a model that has had other weights and steps."""
    training = Training(settings, **options, seed=8)
    training.train(0, 1)
    training.accelerator.load_state(str(folder))
    training.train(BEFORE, len(batches()))
    return training.end()


def both(settings: dict[str, Any], options: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    return whole(settings, options, folder), resumed(settings, options, folder)


@pytest.mark.parametrize(
    ("settings", "options"),
    [(WIDTHS, {"dropout": 0.1}), (STAGES, {}), (COPIES, {"precision": "bf16"})],
    ids=["widths with dropout", "stages", "copies with parts of the optimizer's states in bf16"],
)
def test_a_resumed_training_ends_in_the_weights_of_one_without_a_stop(
    settings: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    without_stop, from_checkpoint = on_ranks(both, 2, settings, options, tmp_path / "checkpoint")[0]
    assert_weights(from_checkpoint, without_stop, ROUNDING)


@pytest.mark.parametrize(
    ("settings", "others"),
    [(WIDTHS, COPIES), (STAGES, WIDTHS)],
    ids=["whole widths after parts", "widths after stages"],
)
def test_a_checkpoint_is_loaded_in_other_degrees(
    settings: dict[str, Any], others: dict[str, Any], tmp_path: Path
) -> None:
    without_stop = on_ranks(whole, 2, settings, {}, tmp_path / "checkpoint")[0]
    in_others = on_ranks(resumed, 2, others, {}, tmp_path / "checkpoint")[0]
    assert_weights(in_others, without_stop, ROUNDING_OF_OTHER_DEGREES)


@contextmanager
def in_former_layout() -> Iterator[None]:
    """Folders as earlier versions wrote them: each single number is a tensor among the shards, by its weight's name."""
    from accelerate_nb.runtime.strategies.megatron import model_parallel

    folder_files, files_of_parts = model_parallel._folder_files, model_parallel.files_of_parts

    def with_numbers(world: Any, name: str, tree: Any, common: dict[str, Any]) -> Any:
        numbers = {
            f"optimizer.state.{key}.{weight}": torch.tensor(value)
            for weight, values in common.pop("numbers", {}).items()
            for key, value in values.items()
        }
        with mock.patch.object(
            model_parallel, "files_of_parts", lambda *place: files_of_parts(*place[:2], {**place[2], **numbers})
        ):
            return folder_files(world, name, tree, common)

    with mock.patch.object(model_parallel, "_folder_files", with_numbers):
        yield


def steps_again(is_former: bool, folder: Path) -> list[float]:
    """How many steps each weight has made on this process, by a checkpoint."""
    training = Training(WIDTHS)
    training.train(0, 1)
    optimizer = training.accelerator.strategy.step_of(training.optimizer).inner.optimizer
    weights = list(optimizer.state)
    for number, weight in enumerate(weights):
        optimizer.state[weight]["step"].fill_(300 + number)
    with in_former_layout() if is_former else nullcontext():
        training.accelerator.save_state(str(folder))
    training.train(1, 2)
    training.accelerator.load_state(str(folder))
    steps = [optimizer.state[weight]["step"].item() for weight in weights]
    training.end()
    return steps


@pytest.mark.parametrize("is_former", [False, True], ids=["as now", "as earlier versions wrote it"])
def test_each_weight_has_its_own_numbers_again(is_former: bool, tmp_path: Path) -> None:
    for found in on_ranks(steps_again, 2, is_former, tmp_path / "checkpoint"):
        assert found
        assert found == [300 + number for number in range(len(found))]


def copies_of_16_bits(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights that a training in bf16 has saved, and those that one in 32 bits has loaded."""
    before = Training(COPIES, precision="bf16")
    before.train(0, 1)
    before.accelerator.save_state(str(folder))
    saved = before.end()
    after = Training(WIDTHS, seed=8)
    after.accelerator.load_state(str(folder))
    return saved, after.end()


def test_a_training_in_32_bits_goes_on_from_the_copies_of_one_in_16_bits(tmp_path: Path) -> None:
    saved, loaded = on_ranks(copies_of_16_bits, 2, tmp_path / "checkpoint")[0]
    assert saved
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name].bfloat16(), value, rtol=0, atol=0)
    assert any(not torch.equal(loaded[name], value.float()) for name, value in saved.items())


def damaged(folder: Path) -> tuple[Any, torch.Tensor]:
    """A weight, and what Megatron itself reads of it; damage and what is not saved are refused, and leave weights as they are."""
    from megatron.core import dist_checkpointing

    training = Training(STAGES)
    accelerator, model = training.accelerator, training.model
    training.train(0, 1)
    accelerator.save_state(str(folder))
    name, model_folder = "decoder.final_layernorm.weight", folder / "pytorch_model_megatron_0"
    state = accelerator.get_state_dict(model)
    by_megatron = dist_checkpointing.load_plain_tensors(str(model_folder))[name]
    if accelerator.is_main_process:
        (folder.parent / "empty").mkdir()
        path = model_folder / "__1_0.distcp"
        content = path.read_bytes()
        numbers = bytes(state[name].untyped_storage())
        assert numbers in content
        path.write_bytes(content.replace(numbers, bytes(len(numbers))))
    accelerator.wait_for_everyone()

    def in_window() -> None:
        accelerator.gradient_accumulation_steps = 2
        with accelerator.accumulate(model):
            accelerator.save_state(str(folder.parent / "window"))

    def with_adafactor() -> None:
        accelerator.gradient_accumulation_steps = 1
        with accelerator.accumulate(model):
            training.optimizer = accelerator.prepare(torch.optim.Adafactor(model.parameters()))
        training.train(0, 1)
        accelerator.save_state(str(folder.parent / "adafactor"))

    for text, call in (
        ("pytorch_model_megatron_0/__1_0.distcp is damaged", lambda: accelerator.load_state(str(folder))),
        ("in a training by Megatron", lambda: accelerator.load_state(str(folder.parent / "empty"))),
        ("Megatron keeps", in_window),
        ("row_var", with_adafactor),
    ):
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(value, after[key]) for key, value in state.items())
        assert_refused(text, call)
    accelerator.end_training()
    return state.get(name), by_megatron


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    expected, by_megatron = on_ranks(damaged, 2, tmp_path / "checkpoint")[0]
    torch.testing.assert_close(by_megatron, expected, rtol=0, atol=0)
    assert not [name for name in ("window", "adafactor") if (tmp_path / name).exists()]
