"""The contract's training by ZeRO's stages, and without their reductions."""

from functools import partial
from pathlib import Path
from typing import Any

from accelerate_nb.utils import DeepSpeedPlugin
from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import ACCUMULATION, MEAN, Arguments, Deletion, Outcome, StrategyCase, trained

LIMIT = 110.0
AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)

# Between two steps: an engine can't give back the gradients of a window.
SAVED_AFTER = 2 * ACCUMULATION
NORM = "the norm at clipping"


def arguments_of_trainer(folder: str, **settings: Any) -> Any:
    """Those of transformers' `Trainer`, which notes each step and writes nothing of its own."""
    from transformers import TrainingArguments

    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    return TrainingArguments(folder, use_cpu=True, logging_steps=1, **quiet, **settings)


def by_stage(stage: int, lacking: str = "", **settings: Any) -> dict[str, Any]:
    """The arguments of `Accelerator`; `lacking` is a reduction that each process does by itself."""
    if lacking:
        from tests.scale.deepspeed import without_reductions

        without_reductions.take_out(lacking)
    return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.0, **settings)}


def outcomes(
    folder: Path, ranks: int, arguments: Arguments, adamw: bool = False, limit: float = LIMIT
) -> list[Outcome]:
    """The ends of the training on all ranks."""
    return run_on_ranks(trained, ranks, str(folder / "checkpoint"), arguments, "no", adamw, SAVED_AFTER, limit=limit)


def case(stage: int, ranks: int) -> StrategyCase:
    # all of a model is clipped by the same norm where each process has all gradients
    lacking = (MEAN,) if stage == 0 else (MEAN, NORM)
    deletions = tuple(Deletion(name, partial(by_stage, stage, name)) for name in lacking)
    return StrategyCase(f"ZeRO {stage} on {ranks}", ranks, partial(by_stage, stage), deletions)


CASES = [case(stage, ranks) for ranks in (2, 4) for stage in (0, 1, 2, 3)]
