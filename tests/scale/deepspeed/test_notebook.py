"""The notebook on DeepSpeed: each of ZeRO's stages ends in the losses of copies."""

from pathlib import Path

import pytest

from tests.notebooks.executing import LIMIT, executed


@pytest.mark.timeout(2 * LIMIT)
def test_each_stage_has_the_losses_of_copies(tmp_path: Path) -> None:
    run = executed("09_deepspeed_and_megatron.ipynb", tmp_path)
    assert list(run.answer) == ["DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3"]
    for result in run.answer.values():
        assert result["losses"] == pytest.approx(run.answer["DDP"]["losses"], rel=1e-3)
        assert result["whole"] == run.answer["DDP"]["held"]
    assert run.answer["ZeRO 3"]["held"] == 0
    assert run.answer["DDP"]["losses"][-1] < 0.5 * run.answer["DDP"]["losses"][0]
