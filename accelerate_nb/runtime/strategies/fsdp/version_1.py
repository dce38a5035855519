"""Values of FSDP's first version, and their equals in the second."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.value_types import Boolean, InvalidValue, did_you_mean
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.constants import FSDP_BACKWARD_PREFETCH, FSDP_SHARDING_STRATEGY
from accelerate_nb.runtime.strategies.fsdp import torch_fsdp

# Arguments of the first version that the second does without, and why.
WITHOUT_EFFECT = {
    "backward_prefetch": "the backward pass always gathers weights ahead",
    "forward_prefetch": "the forward pass gathers weights ahead by itself",
    "use_orig_params": "the optimizer always has the model's own parameters",
    "sync_module_states": "there is no such step",
}
# The strategies by the numbers that torch gives them.
_NUMBERS = {str(number): name for number, name in enumerate(FSDP_SHARDING_STRATEGY, start=1)}


@dataclass(frozen=True, slots=True)
class Sharding:
    """
    A request for sharded weights, in terms of the second version.

    `reshards` is whether weights are sharded again after the forward pass; `is_hybrid` whether they are sharded within a
    machine, and copied across machines. `strategy` is the first version's, where one was named.
    """

    reshards: bool
    strategy: torch_fsdp.ShardingStrategy | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether weights are sharded within a machine, and copied across machines."""
        return self.strategy in {
            torch_fsdp.ShardingStrategy.HYBRID_SHARD,
            torch_fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2,
        }


def sharding_of(value: Any) -> Sharding:
    """
    The sharding that a value requests: a yes or a no, or a strategy of the first version by its name or number.

    `ConfigurationError` names what is unknown, and `NO_SHARD`, which shards nothing.

    >>> sharding_of("SHARD_GRAD_OP").reshards, sharding_of("true").reshards
    (False, True)
    """
    if isinstance(value, bool):
        return Sharding(value)
    if isinstance(value, str) and value not in _NUMBERS:
        try:
            return Sharding(Boolean().parse(value))
        except InvalidValue:
            pass
    strategy = _strategy(value)
    keeps = {torch_fsdp.ShardingStrategy.SHARD_GRAD_OP, torch_fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2}
    return Sharding(strategy not in keeps, strategy)


def requested_strategy(strategy: Any, reshards: Any) -> Any:
    """
    The strategy that two variables request of the first version.

    A launcher sets both; `FSDP_RESHARD_AFTER_FORWARD` is the one that Accelerate's own questions are about.
    """
    usual = reshards if reshards in FSDP_SHARDING_STRATEGY else FSDP_SHARDING_STRATEGY[0]
    return usual if strategy in (None, FSDP_SHARDING_STRATEGY[0]) else strategy


def check_prefetch(value: Any) -> None:
    """Raise `ConfigurationError` where a value is no prefetch of the first version, by its name or number."""
    if not isinstance(value, torch_fsdp.BackwardPrefetch) and str(value) not in {"1", "2"}:
        word_of("backward_prefetch", str(value), FSDP_BACKWARD_PREFETCH)


def word_of(name: str, value: str, known: Iterable[str]) -> str:
    """One of several words, in capitals; `ConfigurationError` names them."""
    word = value.upper()
    if word not in known:
        raise ConfigurationError(
            f"{name} is {value!r}. {did_you_mean(word, known, 'There is no such one.')} Known ones are {', '.join(known)}."
        )
    return word


def _strategy(value: Any) -> torch_fsdp.ShardingStrategy:
    if isinstance(value, torch_fsdp.ShardingStrategy):
        strategy = value
    else:
        name = _NUMBERS.get(str(value)) or word_of("sharding_strategy", str(value), FSDP_SHARDING_STRATEGY)
        strategy = torch_fsdp.ShardingStrategy(FSDP_SHARDING_STRATEGY.index(name) + 1)
    if strategy is torch_fsdp.ShardingStrategy.NO_SHARD:
        raise ConfigurationError(
            "The sharding strategy NO_SHARD was requested, by which FSDP shards nothing. Train with DDP: leave FSDP out."
        )
    return strategy
