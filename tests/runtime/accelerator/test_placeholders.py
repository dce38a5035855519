"""A placeholder that no strategy of the run takes is an error in `prepare`, not at the first step."""

import re
from typing import Any

import pytest

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.utils import DummyOptim, DummyScheduler, MegatronLMDummyDataLoader, MegatronLMDummyScheduler


@pytest.mark.parametrize(
    ("placeholder", "strategy"),
    [
        (DummyOptim([]), "deepspeed"),
        (DummyScheduler(None), "deepspeed"),
        (MegatronLMDummyScheduler(None), "megatron"),
        (MegatronLMDummyDataLoader(), "megatron"),
    ],
    ids=lambda item: type(item).__name__,
)
def test_it_names_the_strategy_that_makes_it(placeholder: Any, strategy: str) -> None:
    message = rf"a {type(placeholder).__name__}, a placeholder .* Pass strategy={re.escape(repr(strategy))}"
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True).prepare(placeholder)
