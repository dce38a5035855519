"""`prepare_pippy` runs a model's stages on all processes, and returns what the model would."""

import pytest
import torch

from accelerate_nb import PartialState, prepare_pippy
from accelerate_nb.errors import DataError
from accelerate_nb.inference import find_pippy_batch_size, generate_device_map
from tests.ranks import run_on_ranks
from tests.runtime.strategies.tiny_llama import batches, llama

pytest.importorskip("transformers")


def check_logits(gather_output: bool, num_chunks: int | None) -> None:
    model = llama(tied=True).eval()
    batch, other = batches()[:2]
    with torch.no_grad():
        wanted, of_three = model(input_ids=batch).logits, model(input_ids=other[:3]).logits
    prepared = prepare_pippy(model, example_args=(batch,), num_chunks=num_chunks, gather_output=gather_output)
    assert prepared is model
    # the first process's batch counts
    found = prepared(input_ids=batch if PartialState().is_main_process else batch.roll(1, 0))
    smaller = prepared(input_ids=other[:3])
    with pytest.raises(DataError, match="without a tensor whose first dimension is the samples'"):
        prepared()
    assert model.hf_split_points == ["model.layers.1"]
    if gather_output or PartialState().is_last_process:
        for output, expected in ((found, wanted), (smaller, of_three)):
            torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-6)
    else:
        assert (found, smaller) == (None, None)


@pytest.mark.parametrize(("gather_output", "num_chunks"), [(True, None), (False, 3)])
def test_the_output_is_that_of_the_model(gather_output: bool, num_chunks: int | None) -> None:
    run_on_ranks(check_logits, 2, gather_output, num_chunks)


def test_one_process_has_the_model_itself_and_the_size_of_a_batch_is_that_of_the_first_tensor() -> None:
    model = torch.nn.Linear(2, 2)
    batch = torch.ones(1, 2)
    assert torch.equal(prepare_pippy(model, example_args=(batch,))(batch), model(batch))
    assert find_pippy_batch_size((None, [torch.ones(3, 2)]), {"other": torch.ones(5)}) == 3
    assert find_pippy_batch_size(None, {"other": torch.ones(5)}) == 5
    assert find_pippy_batch_size((), {}) is None


@pytest.mark.parametrize("processes", [1, 2])
def test_a_device_map_spreads_a_model_as_accelerate_does(processes: int) -> None:
    inference = pytest.importorskip("accelerate.inference")
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)])
    assert generate_device_map(model, processes) == inference.generate_device_map(model, processes)
