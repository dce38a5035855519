"""What a launch with Megatron can know to fail is refused before any worker starts."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import LaunchError, MissingExtraError, NotYetError
from accelerate_nb.launching.planning import placement


def check(kind: str = "cuda", size: int = 4, **options: Any) -> None:
    config = resolve({"strategy": "megatron", "megatron_lm_config": options}, {})
    placement.check_megatron(config.training, kind, size)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelerate-nb\[megatron\]'"):
        check()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"kind": "cpu"}, LaunchError, "on cpu devices"),
        ({"tp_degree": 2, "pp_degree": 4}, LaunchError, "product is 8, which does not divide 4 processes"),
        ({"context_parallel_size": 3}, LaunchError, "product is 3"),
        ({"sequence_parallelism": True}, LaunchError, "with megatron_lm_tp_degree: 1"),
        ({"tp_degree": 2, "no_save_optim": True}, NotYetError, "has no_save_optim, which is not offered"),
        ({"use_custom_fsdp": True}, NotYetError, "use_custom_fsdp"),
    ],
)
def test_what_does_not_go_together_is_named(
    settings: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: ModuleSpec(name, None))
    with pytest.raises(error, match=message):
        check(**settings)


def test_what_goes_together_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: ModuleSpec(name, None))
    check(tp_degree=2, pp_degree=2, sequence_parallelism=True, num_micro_batches=4, hidden_dropout=0.1)
    check(tp_degree=2, use_distributed_optimizer="true", size=8)
