"""The import path `accelerate.utils.versions`: versions compared, under Hugging Face's module name."""

from accelerate_nb.runtime.compat.constants import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from accelerate_nb.runtime.compat.packages import (
    compare_versions as compare_versions,
    is_torch_version as is_torch_version,
)
