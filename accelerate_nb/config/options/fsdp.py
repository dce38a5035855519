"""The options of FSDP, under the keys of Accelerate's `fsdp_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate_nb.config.options.entries import BooleanOrWord, CapitalWord, Entries, Entry, Names
from accelerate_nb.config.value_types import Boolean, Integer, InvalidValue, Text

_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_WORD = "FSDP"
# The key and the value for the version that weights are sharded by.
_VERSION, _OURS = "fsdp_version", 2


@dataclass(frozen=True, slots=True)
class _Sharding(BooleanOrWord):
    """Whether weights are sharded again after a forward, or a strategy of version 1; one that shards nothing is refused."""

    expected: ClassVar[str] = (
        "True, False, FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or HYBRID_SHARD_ZERO2; DDP shards nothing"
    )

    def parse(self, text: str) -> bool | str:
        word = BooleanOrWord.parse(self, _STRATEGIES.get(text.strip(), text))
        if word == "NO_SHARD":
            raise InvalidValue("NO_SHARD shards nothing: train with DDP (strategy='ddp').")
        return word


_KNOWN: dict[str, Entry] = {
    _VERSION: Entry(Integer(1, 2), "FSDP_VERSION", _OURS, 1),
    "fsdp_sharding_strategy": Entry(_Sharding(), "FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
    "fsdp_reshard_after_forward": Entry(_Sharding(), "FSDP_RESHARD_AFTER_FORWARD", True, True, is_lower=True),
    "fsdp_offload_params": Entry(Boolean(), "FSDP_OFFLOAD_PARAMS", False, False),
    "fsdp_min_num_params": Entry(Integer(0), "FSDP_MIN_NUM_PARAMS", 100_000_000, 0),
    "fsdp_auto_wrap_policy": Entry(
        CapitalWord(("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")), "FSDP_AUTO_WRAP_POLICY", None, "NO_WRAP"
    ),
    "fsdp_transformer_layer_cls_to_wrap": Entry(Names(), "FSDP_TRANSFORMER_CLS_TO_WRAP"),
    "fsdp_backward_prefetch": Entry(BooleanOrWord(), "FSDP_BACKWARD_PREFETCH"),
    "fsdp_state_dict_type": Entry(
        CapitalWord(("SHARDED_STATE_DICT", "FULL_STATE_DICT"), ("LOCAL_STATE_DICT",)), "FSDP_STATE_DICT_TYPE"
    ),
    "fsdp_forward_prefetch": Entry(Boolean(), "FSDP_FORWARD_PREFETCH", False),
    "fsdp_use_orig_params": Entry(Boolean(), "FSDP_USE_ORIG_PARAMS", True),
    "fsdp_cpu_ram_efficient_loading": Entry(Boolean(), "FSDP_CPU_RAM_EFFICIENT_LOADING", True, False),
    "fsdp_sync_module_states": Entry(Boolean(), "FSDP_SYNC_MODULE_STATES", True),
    "fsdp_activation_checkpointing": Entry(Boolean(), "FSDP_ACTIVATION_CHECKPOINTING", False, False),
    "fsdp_activation_checkpointing_offload": Entry(Boolean(), "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", False, False),
    "fsdp_ignored_modules": Entry(Text(), "FSDP_IGNORED_MODULES"),
}
OPTIONS = Entries(prefix="fsdp_", known=_KNOWN, ignored=frozenset({"fsdp_backward_prefetch_policy"}))


def variables(options: Mapping[str, Any] | None) -> dict[str, str]:
    """
    The variables through which an `Accelerator` shards weights.

    With options they are all that Accelerate's launcher sets for them; without, FSDP's own defaults count.

    >>> variables(None)
    {'ACCELERATE_USE_FSDP': 'true', 'FSDP_VERSION': '2'}
    """
    found = {"FSDP_VERSION": str(_OURS)} if options is None else OPTIONS.variables(options)
    return {"ACCELERATE_USE_FSDP": "true", **found}


def with_version(options: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The options with a version, where they have none."""
    return dict(options) if {_VERSION, "version"} & options.keys() else {_VERSION: version, **options}


def with_strategy(content: Mapping[str, Any]) -> dict[str, Any]:
    """
    The content of a file for FSDP, in settings; its version is 1 where it names none, as for Accelerate.

    A file with this package's own `strategy` means it, and a version 2 that stands there alone is for Accelerate.

    >>> with_strategy({"distributed_type": "FSDP"})["fsdp_config"]
    {'fsdp_version': 1}
    """
    if str(content.get("distributed_type")).upper() != _WORD:
        return dict(content)
    options = content.get("fsdp_config") or {}
    if "strategy" in content:
        return {name: value for name, value in content.items() if name != "fsdp_config" or value != {_VERSION: _OURS}}
    version_1 = with_version(options, 1) if isinstance(options, Mapping) else options
    return {**content, "strategy": "fsdp", "fsdp_config": version_1}


def for_accelerate(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file whose `strategy` is FSDP, as Accelerate's own tools understand it, too."""
    options = with_version(content.get("fsdp_config") or {}, _OURS)
    return {**content, "distributed_type": _WORD, "fsdp_config": options}
