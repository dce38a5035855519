"""The notebook's training by Megatron, on the CPU behind a shim: a GPT-2 that is cut in two learns to count."""

from functools import partial
from typing import Any

import nbformat
import pytest
import torch

from accelerate_nb import Accelerator
from accelerate_nb.utils import MegatronLMPlugin
from tests.notebooks.executing import FOLDER
from tests.scale.megatron.cuda_on_cpu import on_ranks


def trained() -> Any:
    """What the notebook's function returns on this rank."""
    notebook = nbformat.read(FOLDER / "09_deepspeed_and_megatron.ipynb", as_version=4)
    sources = {cell.id: cell.source for cell in notebook.cells}
    namespace = {"torch": torch, "DataLoader": torch.utils.data.DataLoader}
    namespace["Accelerator"] = partial(Accelerator, cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    exec(sources["train-gpt"], namespace)
    return namespace["train_gpt"]()


@pytest.mark.timeout(180)
def test_a_gpt2_cut_in_two_learns_to_count_and_comes_back() -> None:
    result, other = on_ranks(trained, 2)
    assert other is None
    assert result["losses"][-1] < 0.2 * result["losses"][0]
    assert result["held"] < 0.6 * result["whole"]
    assert result["text"] == list(range(5, 16))
