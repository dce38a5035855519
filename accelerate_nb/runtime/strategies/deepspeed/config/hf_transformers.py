"""What of transformers has to do with DeepSpeed: the configuration that `from_pretrained` reads, and its attention functions."""

from __future__ import annotations

from typing import Any


def announce(config: dict[str, Any]) -> Any:
    """Have transformers know a configuration, for as long as what is returned is kept."""
    from transformers.integrations import deepspeed

    # its functions have no types
    integration: Any = deepspeed
    integration.unset_hf_deepspeed_config()
    return integration.HfDeepSpeedConfig(config)


def attention_functions() -> Any:
    """The functions by which its models attend, by their names: a mapping that can be changed."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS
