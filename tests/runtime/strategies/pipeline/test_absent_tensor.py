"""A tensor whose numbers are on another process has a shape, and no number."""

import pytest
import torch
from torch import nn

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.strategies.pipeline.staged_model import AbsentTensor, absent_in

CPU = torch.device("cpu")


def absent(*shape: int, layer: int = 0) -> AbsentTensor:
    return AbsentTensor(torch.empty(shape, device="meta"), CPU, frozenset({layer}))


def test_what_is_computed_has_the_shape_type_and_device_that_it_would_have() -> None:
    hidden = torch.ones(3, 4).to(torch.bfloat16)
    found = nn.functional.linear(absent(2, 4).bfloat16(), hidden) + torch.ones(2, 1, dtype=torch.bfloat16)
    assert isinstance(found, AbsentTensor)
    assert (found.shape, found.dtype, found.device) == ((2, 3), torch.bfloat16, CPU)
    # it knows the layers of whose outputs it was computed
    (found,) = absent_in({"sum": absent(2, layer=1) + absent(2, layer=4), "other": torch.ones(2)})
    assert found.layers == {1, 4}


def test_a_number_of_it_can_neither_be_read_nor_written_to_a_tensor_with_numbers() -> None:
    for read in (absent(1).item, lambda: bool(absent(2).sum() > 0)):
        with pytest.raises(StateError, match="that another stage of the pipeline computes"):
            read()
    kept = torch.zeros(2)
    with pytest.raises(StateError, match="would write to a tensor what another stage"):
        kept.copy_(absent(2))
    assert kept.tolist() == [0, 0]
