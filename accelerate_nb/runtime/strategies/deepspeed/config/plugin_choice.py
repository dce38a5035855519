"""The plugins of DeepSpeed that an `Accelerator` trains with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.deepspeed.config.plugin import DeepSpeedPlugin


def choose_plugins(plugin: Any, plugins: Any, state: Any, is_requested: bool) -> Any:
    """
    The plugin that was given, or several by name; `None` for a training without DeepSpeed.

    Without one they are those of this process's first `Accelerator`, which `state` has, or, where a launcher requests DeepSpeed, one
    of its variables.
    """
    if plugin is not None and plugins is not None:
        raise ConfigurationError("deepspeed_plugin and deepspeed_plugins were both given. Leave one of them out.")
    given = plugins if plugin is None else plugin
    known = state.deepspeed_plugins
    if given is None:
        return known or (DeepSpeedPlugin() if is_requested else None)
    if known is not None and known is not given:
        raise ConfigurationError(
            "A deepspeed_plugin was given to this process's second Accelerator, and the first has one already. Give the first "
            "deepspeed_plugins={name: plugin, ...}, and call accelerator.state.select_deepspeed_plugin(name) before prepare."
        )
    wrong = [item for item in (given.values() if isinstance(given, Mapping) else [given]) if not _is_plugin(item)]
    if wrong or not given:
        raise ConfigurationError(
            f"`deepspeed_plugin` must be a DeepSpeedPlugin object, or several by name, but is {given!r}. Pass one, or "
            "strategy='deepspeed'."
        )
    return given


def _is_plugin(item: Any) -> bool:
    return isinstance(item, DeepSpeedPlugin)
