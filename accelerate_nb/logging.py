"""The import path `accelerate.logging`: loggers that know their process under Hugging Face's module name."""

from accelerate_nb.runtime.observability.logging import (
    MultiProcessAdapter as MultiProcessAdapter,
    get_logger as get_logger,
)
