"""The mesh that the devices of one process form: its axes, and how many devices lie along each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.config.value_types import InvalidValue
from accelerate_nb.errors import ConfigurationError

# Along "data" each device has other samples; along "fsdp" other samples and another part of each weight; along "tensor" the
# same samples, and another part of those weights that a rule names.
AXES = ("data", "fsdp", "tensor")


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """A mesh in words: names of axes, each once, each with its size or, for at most one of them, without: the rest."""

    PLACEHOLDER: ClassVar[str] = "AXIS=N,..."
    expected: ClassVar[str] = "axes of a mesh with their sizes, such as 'fsdp' or 'data=2,fsdp=4'"

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise InvalidValue
        return self.parse(value)

    def parse(self, text: str) -> str:
        return ",".join(name if size == -1 else f"{name}={size}" for name, size in _parts(text).items())


def sizes(mesh: str, devices: int) -> dict[str, int]:
    """
    The size of each axis where there are so many devices; one without a size takes what the others leave.

    >>> sizes("data=2,fsdp", 8)
    {'data': 2, 'fsdp': 4}
    """
    try:
        parts = _parts(mesh)
    except InvalidValue as unfit:
        raise ConfigurationError(
            f"The mesh {mesh!r} was requested, but it should be {MeshAxes().expected}. "
            f"{unfit.args[0] if unfit.args else f'The axes are {_listed()}.'}"
        ) from None
    product = math.prod(size for size in parts.values() if size != -1)
    found = {name: devices // product if size == -1 else size for name, size in parts.items()}
    if math.prod(found.values()) != devices:
        raise ConfigurationError(
            f"The mesh {mesh!r} needs {'a multiple of ' * (-1 in parts.values())}{product} devices, but there are "
            f"{devices}. Choose sizes whose product is {devices}, or leave one size out: it becomes what is left."
        )
    return found


def _parts(text: str) -> dict[str, int]:
    """The axes in their order; -1 is the size that was left out."""
    found: dict[str, int] = {}
    for part in text.lower().split(","):
        name, equals, size = (item.strip() for item in part.partition("="))
        if name not in AXES:
            raise InvalidValue(
                f"There is no axis {name!r}. {did_you_mean(name, AXES)} The axes are {_listed()}.".replace("  ", " ")
            )
        if name in found:
            raise InvalidValue(f"The axis {name!r} is there twice.")
        found[name] = _size(size) if equals else -1
    if sum(size == -1 for size in found.values()) > 1:
        raise InvalidValue("Only one axis can be without a size.")
    return found


def _size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        raise InvalidValue(f"The size {text!r} is not a whole number.") from None
    if size < 1 and size != -1:
        raise InvalidValue(f"The size {size} is neither a number of devices nor -1, which means the rest.")
    return size


def _listed() -> str:
    return ", ".join(AXES)
