"""The strategies of XLA devices end a training in the weights of one process, as all others do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from accelerate_nb.runtime.strategies.xla_ddp import XlaDDP
from tests.runtime.strategies.contract import difference, trained

# The compiler adds in another order than PyTorch.
ROUNDING = 1e-5


def on_the_device() -> dict[str, Any]:
    return {"cpu": False}


class XlaDDPWithoutMean(XlaDDP):
    """Copies whose gradients stay each device's own."""

    def _mean(self, gradients: Sequence[Tensor]) -> None:
        pass


def without_mean() -> dict[str, Any]:
    return {"cpu": False, "strategy": XlaDDPWithoutMean}


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        pytest.param(on_the_device, {}, id="one device"),
        pytest.param(on_the_device, {"num_processes": 2}, id="copies on two"),
    ],
)
def test_a_training_ends_in_the_weights_of_one_process(
    on_xla: Callable[..., list[Any]], tmp_path: Path, arguments: Callable[[], dict[str, Any]], settings: dict[str, Any]
) -> None:
    assert difference(on_xla(trained, str(tmp_path / "checkpoint"), arguments, **settings)) < ROUNDING


def test_copies_without_their_mean_end_in_other_weights(on_xla: Callable[..., list[Any]], tmp_path: Path) -> None:
    found = on_xla(trained, str(tmp_path / "checkpoint"), without_mean, num_processes=2)
    assert difference(found) > 100 * ROUNDING
