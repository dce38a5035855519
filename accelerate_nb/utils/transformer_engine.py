"""The import path `accelerate.utils.transformer_engine`."""

from accelerate_nb.runtime.precision.fp8 import (
    apply_fp8_autowrap as apply_fp8_autowrap,
    contextual_fp8_autocast as contextual_fp8_autocast,
    convert_model as convert_model,
    has_transformer_engine_layers as has_transformer_engine_layers,
)
