"""The settings of FSDP, under Accelerate's name: arguments, variables `FSDP_*`, and their values for FSDP's second version."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accelerate_nb.config.options.fsdp import OPTIONS, STRATEGY, FsdpOptions
from accelerate_nb.config.value_types import Boolean, InvalidValue, did_you_mean
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat import constants
from accelerate_nb.runtime.compat.packages import is_cuda_available
from accelerate_nb.runtime.training.unwrap import requested_class
from accelerate_nb.user_warnings import warn_user

if TYPE_CHECKING:
    from torch.distributed import fsdp

# Arguments of the first version that the second does without, and why.
WITHOUT_EFFECT = {
    "backward_prefetch": "the backward pass always gathers weights ahead",
    "forward_prefetch": "the forward pass gathers weights ahead by itself",
    "use_orig_params": "the optimizer always has the model's own parameters",
    "sync_module_states": "there is no such step",
}
# The strategies by the numbers that torch gives them.
_NUMBERS = {str(number): name for number, name in enumerate(constants.FSDP_SHARDING_STRATEGY, start=1)}


def sharding_of(value: Any) -> tuple[bool, fsdp.ShardingStrategy | None]:
    """Whether weights are sharded again after the forward pass, and the first version's strategy, where the value names one."""
    from torch.distributed import fsdp

    if isinstance(value, bool):
        return value, None
    if isinstance(value, str) and value not in _NUMBERS:
        with suppress(InvalidValue):
            return Boolean().parse(value), None
    strategies = fsdp.ShardingStrategy
    if not isinstance(value, strategies):
        name = _NUMBERS.get(str(value)) or word_of("sharding_strategy", str(value), constants.FSDP_SHARDING_STRATEGY)
        value = strategies(constants.FSDP_SHARDING_STRATEGY.index(name) + 1)
    if value is strategies.NO_SHARD:
        raise ConfigurationError(
            "The sharding strategy NO_SHARD was requested, by which FSDP shards nothing. Train with DDP: leave FSDP out."
        )
    return value not in {strategies.SHARD_GRAD_OP, strategies._HYBRID_SHARD_ZERO2}, value


def word_of(name: str, value: str, known: Iterable[str]) -> str:
    """One of several words, in capitals; `ConfigurationError` names them."""
    word = value.upper()
    if word not in known:
        raise ConfigurationError(
            f"{name} is {value!r}. {did_you_mean(word, known, 'There is no such one.')} Known ones are {', '.join(known)}."
        )
    return word


_RAM_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"
# The type to compute in, by the name of a precision.
_DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class FullyShardedDataParallelPlugin(FsdpOptions):
    """
    The configuration of sharded weights; `None` leaves a value to the `FSDP_*` variables, which a launcher sets.

    Weights are always sharded by FSDP's second version. A plugin of version 1, which is the default as in Accelerate, gets the
    equal values of version 2, and `fsdp_version` is 2; `requested_version` keeps the number. `hybrid_shard` is whether a
    strategy of version 1 requested shards within a machine, and copies across machines. `policy_of_precision` is the policy
    that an Accelerator made of its `mixed_precision`, where the plugin had none.

    >>> plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    >>> plugin.reshard_after_forward, plugin.state_dict_type.name
    (True, 'SHARDED_STATE_DICT')
    """

    def __post_init__(self) -> None:
        given: int | None = self.fsdp_version
        version = _read("version") if given is None else given
        if str(version) not in {"1", "2"}:
            raise ConfigurationError(
                f"fsdp_version is {version!r}. FSDP has the versions 1 and 2: pass fsdp_version=2."
            )
        self.requested_version = int(version)
        self.policy_of_precision: fsdp.MixedPrecisionPolicy | None = None
        self.fsdp_version = 2
        self._choose_sharding()
        if self.cpu_offload is None:
            self.cpu_offload = _read("offload_params")
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self._drop_what_has_no_effect(
            is_version_1=self.requested_version == 1 and (given is not None or "FSDP_VERSION" in os.environ)
        )
        self.set_state_dict_type()
        self._choose_wrapping()
        for name in ("activation_checkpointing", "activation_checkpointing_offload", "ignored_modules"):
            if getattr(self, name) is None:
                setattr(self, name, _read(name))
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigurationError(
                "activation_checkpointing_offload=True was requested with activation_checkpointing=False, but only what is "
                "checkpointed can be offloaded. Pass activation_checkpointing=True as well."
            )
        if self.cpu_ram_efficient_loading is None:
            self.cpu_ram_efficient_loading = _read("cpu_ram_efficient_loading")
        else:
            # transformers reads it when it loads a model
            os.environ[_RAM_EFFICIENT_LOADING] = str(self.cpu_ram_efficient_loading)
        self._choose_mixed_precision()

    @property
    def writes_parts(self) -> bool:
        """Whether checkpoints are in parts, a file a process, rather than complete."""
        from torch.distributed import fsdp

        return self.state_dict_type is not fsdp.StateDictType.FULL_STATE_DICT

    def set_state_dict_type(self, state_dict_type: str | fsdp.StateDictType | None = None) -> None:
        """
        Set what a checkpoint's model is: parts of each process ("SHARDED_STATE_DICT"), or one whole ("FULL_STATE_DICT").

        Without a type it is that of the plugin, then that of the variable `FSDP_STATE_DICT_TYPE`; the default is whole for a
        plugin of version 1, else in parts. `ConfigurationError` names another.
        """
        from torch.distributed import fsdp

        default = constants.FSDP2_STATE_DICT_TYPE[1 if self.requested_version == 1 else 0]
        requested = state_dict_type or self.state_dict_type or os.environ.get("FSDP_STATE_DICT_TYPE", default)
        types = fsdp.StateDictType
        if isinstance(requested, str):
            name = requested.upper()
            found = next((item for item in types if name in {item.name, str(item.value)}), None)
            requested = found or types[word_of("state_dict_type", requested, constants.FSDP2_STATE_DICT_TYPE)]
        if requested is types.LOCAL_STATE_DICT:
            raise ConfigurationError(
                "state_dict_type=LOCAL_STATE_DICT was requested, which version 2 of FSDP doesn't have. Pass 'SHARDED_STATE_DICT', "
                "each process's part, or 'FULL_STATE_DICT'."
            )
        self.state_dict_type = requested
        of_model: Any = fsdp.ShardedStateDictConfig
        of_optimizer: Any = fsdp.ShardedOptimStateDictConfig
        if requested is types.FULL_STATE_DICT:
            of_model = partial(fsdp.FullStateDictConfig, rank0_only=True)
            of_optimizer = partial(fsdp.FullOptimStateDictConfig, rank0_only=True)
        self.state_dict_config = self.state_dict_config or of_model(offload_to_cpu=True)
        self.optim_state_dict_config = self.optim_state_dict_config or of_optimizer(offload_to_cpu=True)

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """
        Complete the policy for a model: the classes of its blocks, or the size from which a module is a unit of its own.

        Without `transformer_cls_names_to_wrap` the classes are those of transformers' `_no_split_modules`. `ConfigurationError`
        names a class that the model doesn't have.
        """
        from torch.distributed.fsdp import wrap

        if self.auto_wrap_policy is wrap.transformer_auto_wrap_policy:
            if self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = list(getattr(model, "_no_split_modules", None) or ())
            classes = {
                requested_class(model, name, "transformer_cls_names_to_wrap")
                for name in self.transformer_cls_names_to_wrap
            }
            self.auto_wrap_policy = partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is wrap.size_based_auto_wrap_policy:
            size = self.min_num_params or 0
            self.auto_wrap_policy = partial(wrap.size_based_auto_wrap_policy, min_num_params=size) if size > 0 else None

    def set_mixed_precision(
        self,
        mixed_precision: str | torch.dtype | Mapping[str, torch.dtype],
        buffer_autocast: bool = False,
        override: bool = False,
    ) -> None:
        """
        Set the types of weights, gradients and outputs: all those of a precision, such as "bf16".

        A policy that is there already stays, unless `override` is true; a `dict` becomes one.
        """
        from torch.distributed import fsdp

        if override or self.mixed_precision_policy is None:
            dtype: Any = _DTYPES.get(mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
            if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
                raise ConfigurationError(
                    f"The mixed precision {mixed_precision!r} was requested. Pass one of {', '.join(_DTYPES)}, or the type of one."
                )
            self.mixed_precision_policy = fsdp.MixedPrecisionPolicy(dtype, dtype, dtype)
        elif isinstance(dtypes := self.mixed_precision_policy, dict):
            wanted = {"param_dtype", "reduce_dtype", "buffer_dtype" if self.requested_version == 1 else "output_dtype"}
            if dtypes.keys() != wanted or not all(dtype in _DTYPES.values() for dtype in dtypes.values()):
                raise ConfigurationError(
                    f"mixed_precision_policy is {dtypes!r}. It must be a dict with the keys {', '.join(sorted(wanted))}, whose "
                    f"values are of {', '.join(map(str, dict.fromkeys(_DTYPES.values())))}."
                )
            given = dtypes["param_dtype"], dtypes["reduce_dtype"], dtypes.get("output_dtype")
            self.mixed_precision_policy = fsdp.MixedPrecisionPolicy(*given)

    def validate_mixed_precision_policy(self) -> None:
        """Raise `ConfigurationError` where the policy is not one of FSDP's second version."""
        from torch.distributed import fsdp

        if not isinstance(self.mixed_precision_policy, fsdp.MixedPrecisionPolicy):
            raise ConfigurationError(
                f"mixed_precision_policy is {self.mixed_precision_policy!r}. It must be an instance of "
                "torch.distributed.fsdp.MixedPrecisionPolicy: pass one, or 'bf16', 'fp16' or 'fp32'."
            )

    def set_cpu_offload(self) -> None:
        """Make a policy of `cpu_offload`; memory is pinned only where there is a GPU to copy it to."""
        from torch.distributed import fsdp

        offload = self.cpu_offload.offload_params if isinstance(self.cpu_offload, fsdp.CPUOffload) else self.cpu_offload
        if isinstance(offload, bool):
            offload = fsdp.CPUOffloadPolicy() if offload else fsdp.OffloadPolicy()
        # torch refuses to pin memory without a device
        if isinstance(offload, fsdp.CPUOffloadPolicy) and offload.pin_memory and not is_cuda_available():
            offload = replace(offload, pin_memory=False)
        self.cpu_offload = offload

    def validate_cpu_offload(self) -> None:
        """Raise `ConfigurationError` where `cpu_offload` is not a policy of FSDP's second version."""
        from torch.distributed import fsdp

        if not isinstance(self.cpu_offload, fsdp.OffloadPolicy):
            raise ConfigurationError(
                f"cpu_offload is {self.cpu_offload!r}. It must be an instance of torch.distributed.fsdp.OffloadPolicy: pass "
                "True, False or one."
            )

    def _choose_sharding(self) -> None:
        is_version_1 = self.requested_version == 1
        if is_version_1 and self.sharding_strategy is None and self.reshard_after_forward is None:
            # a launcher sets both variables; FSDP_RESHARD_AFTER_FORWARD is the one that Accelerate's own questions are about
            strategy, reshards = _read("sharding_strategy"), _read("reshard_after_forward")
            usual = reshards if reshards in constants.FSDP_SHARDING_STRATEGY else constants.FSDP_SHARDING_STRATEGY[0]
            self.sharding_strategy = usual if strategy in (None, constants.FSDP_SHARDING_STRATEGY[0]) else strategy
        value: Any = self.reshard_after_forward
        # of version 1 the strategy wins, as in Accelerate
        if self.sharding_strategy is not None and (is_version_1 or value is None):
            value = self.sharding_strategy
        if value is None:
            value = _read("reshard_after_forward")
        self.reshard_after_forward, strategy = sharding_of(value)
        if is_version_1 and self.sharding_strategy is not None:
            self.sharding_strategy = strategy
        self.hybrid_shard = strategy is not None and "HYBRID" in strategy.name

    def _drop_what_has_no_effect(self, *, is_version_1: bool) -> None:
        """Check the arguments of the first version, take them back, and warn of them once."""
        # torch's own value has a name
        prefetch = str(getattr(self.backward_prefetch, "name", self.backward_prefetch))
        if self.backward_prefetch is not None and prefetch not in {"1", "2"}:
            word_of("backward_prefetch", prefetch, constants.FSDP_BACKWARD_PREFETCH)
        reasons = {name: why for name, why in WITHOUT_EFFECT.items() if getattr(self, name) is not None}
        for name in reasons:
            setattr(self, name, None)
        if not self.limit_all_gathers:
            reasons["limit_all_gathers"] = "the number of gathers in flight is always limited"
        sentences = ["fsdp_version=1 was requested: weights are sharded by version 2 here."] if is_version_1 else []
        sentences += [f"{name} changes nothing in version 2 of FSDP: {why}." for name, why in reasons.items()]
        if sentences:
            warn_user(" ".join([*sentences, f"Pass fsdp_version=2{' without them' if reasons else ''}."]))

    def _choose_wrapping(self) -> None:
        from torch.distributed.fsdp import wrap

        if self.auto_wrap_policy is None:
            self.auto_wrap_policy = _read("auto_wrap_policy")
        if not isinstance(self.auto_wrap_policy, str):
            return
        name = word_of("auto_wrap_policy", self.auto_wrap_policy, constants.FSDP_AUTO_WRAP_POLICY)
        if name == "TRANSFORMER_BASED_WRAP":
            self.auto_wrap_policy = wrap.transformer_auto_wrap_policy
            classes: Any = self.transformer_cls_names_to_wrap
            if classes is None:
                classes = _read("transformer_layer_cls_to_wrap")
            self.transformer_cls_names_to_wrap = classes.split(",") if isinstance(classes, str) else classes
        elif name == "SIZE_BASED_WRAP":
            self.auto_wrap_policy = wrap.size_based_auto_wrap_policy
            if self.min_num_params is None:
                self.min_num_params = _read("min_num_params")
            if not isinstance(self.min_num_params, int):
                raise ConfigurationError(
                    f"min_num_params is {self.min_num_params!r}. It must be an integer: the number of weights from which "
                    "a module is a unit of its own."
                )
        else:
            self.auto_wrap_policy = None

    def _choose_mixed_precision(self) -> None:
        from torch.distributed import fsdp

        policy = self.mixed_precision_policy
        if isinstance(policy, (str, dict)):
            self.set_mixed_precision(policy, override=isinstance(policy, str))
        elif isinstance(policy, fsdp.MixedPrecision):
            # the first version gives a model's outputs as they come, and casts its inputs at the root alone
            self.mixed_precision_policy = fsdp.MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()


def enable_fsdp_ram_efficient_loading() -> None:
    """Have transformers load weights on one process of each machine alone; the others get them when the model is prepared."""
    os.environ.setdefault(STRATEGY.variable, "True")
    os.environ[_RAM_EFFICIENT_LOADING] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Have transformers load weights on every process."""
    os.environ[_RAM_EFFICIENT_LOADING] = "False"


def _read(name: str) -> Any:
    """The value of an option's variable, or its default."""
    return OPTIONS.read(name, os.environ)
