"""The installed version of a package, compared with the one that is needed."""

from __future__ import annotations

import functools
from importlib.metadata import version as installed_version

from packaging.version import Version, parse

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.constants import STR_OPERATION_TO_FUNC


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """
    Whether a version, or the installed version of a named package, relates to another by ">", ">=", "==", "!=", "<=" or "<".

    >>> compare_versions("torch", ">=", "2.9")
    True
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigurationError(
            f"Versions were to be compared by {operation!r}. `operation` must be one of {list(STR_OPERATION_TO_FUNC)}."
        )
    if isinstance(library_or_version, str):
        library_or_version = parse(installed_version(library_or_version))
    return STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the installed torch's version relates to `version` by `operation`."""
    return compare_versions(_torch_version(), operation, version)


@functools.cache
def _torch_version() -> Version:
    return parse(installed_version("torch"))
