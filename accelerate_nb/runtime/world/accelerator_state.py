"""This process with what its `Accelerator` chose, under Hugging Face's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.runtime.compat.enums import DistributedType
from accelerate_nb.runtime.compat.env_vars import LauncherSettings
from accelerate_nb.runtime.compat.unsupported import refuse
from accelerate_nb.runtime.precision.base import precision_name
from accelerate_nb.runtime.world.registry import SharedState
from accelerate_nb.runtime.world.state import PartialState, known

# Attributes that an `Accelerator` sets.
_SET_BY_ACCELERATOR = ("strategy", "dynamo_plugin")
# Attributes that the strategy answers for, unless they were assigned; `None` where there is no strategy.
_OF_STRATEGY = (
    *("deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin"),
    *("parallelism_config", "device_mesh", "xla_mesh"),
)


class AcceleratorState(PartialState):
    """The process with what its `Accelerator` chose: every instance shows the same attributes."""

    _shared_state = SharedState()

    _mixed_precision: str
    dynamo_plugin: Any
    strategy: Any

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **options: Any,
    ) -> None:
        refuse(
            type(self).__name__,
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
        )
        partial = PartialState(cpu, **options)
        self.__dict__ = self._shared_state
        first = "_mixed_precision" not in self.__dict__
        if first and not _from_accelerator:
            raise StateError(
                "AcceleratorState() was requested before there was an Accelerator. "
                "Make one first: `accelerator = Accelerator()`; for the process alone use `PartialState()`."
            )
        self.__dict__.update(partial.__dict__)
        if first:
            self.__dict__.update(dict.fromkeys(_SET_BY_ACCELERATOR))
        if dynamo_plugin is not None:
            self.dynamo_plugin = dynamo_plugin
        if first or mixed_precision is not None:
            self._mixed_precision = precision_name(mixed_precision or LauncherSettings.read(os.environ).mixed_precision)

    @property
    def initialized(self) -> bool:
        """Whether some instance was made since the last reset."""
        return "_mixed_precision" in self.__dict__

    @property
    def mixed_precision(self) -> str:
        """The name of the numbers that a step is computed in."""
        return known(self, "_mixed_precision")  # type: ignore[no-any-return]  # kept in a dictionary

    def set_precision(self, name: str) -> None:
        """Note the precision that the strategy has chosen."""
        self._mixed_precision = name

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded by the second version of FSDP."""
        return bool(self._of_strategy("is_fsdp2"))

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin of DeepSpeed in force; `None` without DeepSpeed."""
        return self._of_strategy("deepspeed_plugin")

    def __getattr__(self, name: str) -> Any:
        # what was assigned is found before; other names raise what they raised
        return self._of_strategy(name) if name in _OF_STRATEGY else object.__getattribute__(self, name)

    def _of_strategy(self, name: str) -> Any:
        strategy = self.__dict__.get("strategy")
        return None if strategy is None else getattr(strategy, name)

    def _connection_type(self) -> DistributedType:
        return self._of_strategy("distributed_type") or super()._connection_type()

    def get_deepspeed_plugin(self, name: str) -> Any:
        """One of several plugins of DeepSpeed; `ConfigurationError` where there is none of this name."""
        plugins = self.deepspeed_plugins
        named = plugins if isinstance(plugins, Mapping) else {}
        if name not in named:
            known = ", ".join(map(repr, named)) or (
                "one without a name" if plugins else "none, since this run doesn't use DeepSpeed"
            )
            raise ConfigurationError(f"The DeepSpeed plugin {name!r} was requested; there are {known}. Leave it out.")
        return named[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Put one of several plugins of DeepSpeed in force; `ConfigurationError` where there is none of this name."""
        chosen = self.get_deepspeed_plugin(str(name))
        for plugin in self.deepspeed_plugins.values():
            plugin.unselect()
        chosen.select(_from_accelerator_state=True)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        mesh = f"XLA mesh: {self.xla_mesh}\n" if self.xla_mesh else ""
        return PartialState.__repr__(self) + f"{mesh}\nMixed precision type: {self.mixed_precision}\n"


def is_initialized() -> bool:
    """Whether an `Accelerator` was made in this process."""
    return bool(AcceleratorState._shared_state)
