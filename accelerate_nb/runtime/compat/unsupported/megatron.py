"""Megatron-LM: the name of a function that is not there yet."""

from __future__ import annotations

from typing import Any

from accelerate_nb.runtime.compat.unsupported.base import Unsupported

_unsupported = Unsupported(
    "a GLM-4 mixture of experts in Megatron-LM", "Add a parser of your own with add_model_config_to_megatron_parser."
)


@_unsupported
def parse_glm4_moe_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> Any: ...
