"""The options of FSDP: the fields of its plugin, of which most are keys of Accelerate's `fsdp_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from accelerate_nb.config.options.entries import BooleanOrWord, Entries, Names, StrategyOptions, entries_of, option
from accelerate_nb.config.value_types import Boolean, Integer, InvalidValue, OneOf, Text

_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
# The key and the value for the version that weights are sharded by.
_VERSION, _OURS = "fsdp_version", 2


@dataclass(frozen=True, slots=True)
class _Sharding(BooleanOrWord):
    """Whether weights are sharded again after a forward, or a strategy of version 1; one that shards nothing is refused."""

    expected = "True, False, FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or HYBRID_SHARD_ZERO2; DDP shards nothing"

    def parse(self, text: str) -> bool | str:
        word = BooleanOrWord.parse(self, _STRATEGIES.get(text.strip(), text))
        if word == "NO_SHARD":
            raise InvalidValue("NO_SHARD shards nothing: train with DDP (strategy='ddp').")
        return word


@dataclass
class FsdpOptions:
    """The fields of FSDP's plugin, in Accelerate's order; one that is `None` is read from its variable `FSDP_*`."""

    fsdp_version: Any = option(Integer(1, 2), 1, launched=_OURS, key=_VERSION, variable="FSDP_VERSION")
    sharding_strategy: Any = option(_Sharding(), launched="FULL_SHARD")
    reshard_after_forward: Any = option(_Sharding(), True, launched=True)
    backward_prefetch: Any = option(BooleanOrWord())
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = option(OneOf(("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")), "NO_WRAP")
    cpu_offload: Any = option(
        Boolean(), False, launched=False, key="fsdp_offload_params", variable="FSDP_OFFLOAD_PARAMS"
    )
    ignored_modules: Any = option(Text())
    state_dict_type: Any = option(OneOf(("SHARDED_STATE_DICT", "FULL_STATE_DICT"), ("LOCAL_STATE_DICT",)))
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = option(Boolean(), launched=True)
    param_init_fn: Any = None
    sync_module_states: bool | None = option(Boolean(), launched=True)
    forward_prefetch: bool | None = option(Boolean(), launched=False)
    activation_checkpointing: bool | None = option(Boolean(), False, launched=False)
    activation_checkpointing_offload: bool | None = option(Boolean(), False, launched=False)
    cpu_ram_efficient_loading: bool | None = option(Boolean(), False, launched=True)
    transformer_cls_names_to_wrap: list[str] | None = option(
        Names(), key="fsdp_transformer_layer_cls_to_wrap", variable="FSDP_TRANSFORMER_CLS_TO_WRAP"
    )
    min_num_params: int | None = option(Integer(0), 0, launched=100_000_000)


_KNOWN = entries_of(FsdpOptions, "fsdp_", "FSDP_")
# Accelerate's launcher writes it in small letters.
_KNOWN["fsdp_reshard_after_forward"] = replace(_KNOWN["fsdp_reshard_after_forward"], is_lower=True)
OPTIONS = Entries(prefix="fsdp_", known=_KNOWN, ignored=frozenset({"fsdp_backward_prefetch_policy"}))


class _Fsdp(StrategyOptions):
    """FSDP: a file without a version means 1, as for Accelerate, and this package's own `strategy` means 2."""

    def variables(self, options: Mapping[str, Any] | None) -> dict[str, str]:
        """With options they are all that Accelerate's launcher sets for them; without, FSDP's own defaults count."""
        if options is None:
            return {self.variable: "true", "FSDP_VERSION": str(_OURS)}
        return super().variables(options)

    def with_strategy(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """A file with this package's own `strategy` means it, and a version 2 that stands there alone is for Accelerate."""
        if not self.is_requested(content):
            return dict(content)
        if "strategy" in content:
            return {name: value for name, value in content.items() if name != self.key or value != {_VERSION: _OURS}}
        options = content.get(self.key) or {}
        version_1 = _with_version(options, 1) if isinstance(options, Mapping) else options
        return {**super().with_strategy(content), self.key: version_1}

    def for_accelerate(self, content: Mapping[str, Any]) -> dict[str, Any]:
        options = _with_version(content.get(self.key) or {}, _OURS)
        return super().for_accelerate({**content, self.key: options})


def _with_version(options: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The options with a version, where they have none."""
    return dict(options) if {_VERSION, "version"} & options.keys() else {_VERSION: version, **options}


STRATEGY = _Fsdp("fsdp", "FSDP", "ACCELERATE_USE_FSDP", "fsdp_config", OPTIONS)
