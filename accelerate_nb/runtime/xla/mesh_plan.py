"""Which part of each tensor lies on which devices of one process; decided without a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Module

from accelerate_nb.config.mesh import AXES, sizes
from accelerate_nb.config.nearest import meant
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.handlers import KwargsHandler

# For each dimension of a tensor the axis along which it is cut, several axes, or `None` for a dimension that is whole everywhere.
Layout = tuple[str | tuple[str, ...] | None, ...]

VARIABLE = "ACCELERATE_NB_XLA_MESH"
# The axes along which devices have different samples.
_OF_BATCHES = ("data", "fsdp")


@dataclass
class XlaMesh(KwargsHandler):
    """
    How one process drives all of its XLA devices (torch_xla's SPMD, as in its FSDPv2), for `Accelerator(kwargs_handlers=[...])`.

    `axes` is what the setting `xla_mesh` says, and is taken from there where it is left out: "data" gives each device other
    samples, "fsdp" also another part of each weight, "tensor" another part of the weights that a rule names. `rules` maps names
    of weights, with `*`, to the axis of each dimension. Weights that no rule names lie along "fsdp" in the first dimension
    that divides; those of fewer than `min_size` numbers are whole everywhere. `recompute` names classes of layers whose
    activations are computed again in the backward. `inputs` gives keys of batches other layouts than samples along "data" and
    "fsdp". On other devices than XLA's it changes nothing.

    >>> mesh = XlaMesh("fsdp=2,tensor=2", rules={"*.up.weight": ("tensor", "fsdp"), "*.down.weight": ("fsdp", "tensor")})
    >>> accelerator = Accelerator(kwargs_handlers=[mesh])  # doctest: +SKIP
    """

    axes: str | None = None
    rules: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    min_size: int = 1024
    recompute: Sequence[str] = ()
    inputs: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def _fill(self, environment: Mapping[str, str]) -> None:
        if self.axes is None:
            self.axes = environment.get(VARIABLE) or None


@dataclass(frozen=True)
class Plan:
    """An `XlaMesh` on so many devices: `sizes` has the axes in their order."""

    asked: XlaMesh
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, asked: XlaMesh, devices: int) -> Plan:
        """The plan for a machine; `ConfigurationError` where the mesh does not fit its devices, or a rule the mesh."""
        assert asked.axes is not None
        plan = cls(asked, sizes(asked.axes, devices))
        for what, layouts in (("rules", asked.rules), ("inputs", asked.inputs)):
            for name, layout in layouts.items():
                plan._check_axes(f"{what}[{name!r}]", layout)
        return plan

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    def of_model(self, model: Module) -> dict[str, Layout]:
        """The layout of each weight and each buffer, under all of its names; a tied weight lies as the first rule says."""
        names: dict[int, list[str]] = {}
        layouts: dict[str, Layout] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), []).append(name)
        unused = set(self.asked.rules)
        for own in names.values():
            shape = model.get_parameter(own[0]).shape
            rule = next((each for each in self.asked.rules if any(fnmatchcase(name, each) for name in own)), None)
            layout = self._of_weight(shape)
            if rule is not None:
                unused.discard(rule)
                layout = self._ruled(f"The rule {rule!r} for {own[0]!r}", self.asked.rules[rule], shape)
            layouts.update(dict.fromkeys(own, layout))
        if unused:
            raise ConfigurationError(_unused(sorted(unused), list(layouts)))
        # said, because the compiler would choose for what is written to
        buffers = model.named_buffers(remove_duplicate=False)
        return layouts | {name: (None,) * buffer.ndim for name, buffer in buffers}

    def of_input(self, shape: Sequence[int], key: str | None = None) -> Layout:
        """The layout of a tensor of a batch; where its rows do not divide by the devices, by as many of them as do."""
        if key is not None and key in self.asked.inputs:
            return self._ruled(f"XlaMesh(inputs=...) for {key!r}", self.asked.inputs[key], shape)
        return () if not shape else (self._of_rows(shape[0]), *[None] * (len(shape) - 1))

    def _of_rows(self, rows: int) -> str | tuple[str, ...] | None:
        there = tuple(axis for axis in _OF_BATCHES if axis in self.sizes)
        ways = [there, *((axis,) for axis in sorted(there, key=lambda axis: -self.sizes[axis]))]
        best = next((axes for axes in ways if axes and rows and rows % self._devices(axes) == 0), ())
        return best[0] if len(best) == 1 else best or None

    def _of_weight(self, shape: Sequence[int]) -> Layout:
        layout: list[str | None] = [None] * len(shape)
        size = self.sizes.get("fsdp", 1)
        if size > 1 and math.prod(shape) >= self.asked.min_size:
            for dim, length in enumerate(shape):
                if length and length % size == 0:
                    layout[dim] = "fsdp"
                    break
        return tuple(layout)

    def _ruled(self, who: str, layout: Sequence[Any], shape: Sequence[int]) -> Layout:
        said = tuple(tuple(each) if isinstance(each, list) else each for each in layout)
        if len(said) != len(shape):
            raise ConfigurationError(
                f"{who} has {len(said)} entries, {said}, but the tensor's shape is {tuple(shape)}. Give one for each dimension."
            )
        for length, axes in zip(shape, said, strict=True):
            if length % self._devices(_as_tuple(axes)):
                raise ConfigurationError(
                    f"{who} cuts a dimension of {length} along {axes!r}, which has {self._devices(_as_tuple(axes))} devices. "
                    "Cut another dimension, or make it a multiple."
                )
        return said

    def _check_axes(self, who: str, layout: Sequence[Any]) -> None:
        if isinstance(layout, str):
            raise ConfigurationError(
                f"XlaMesh({who}) is {layout!r}, but should have an axis or None for each dimension: ({layout!r}, None)."
            )
        used = [axis for axes in layout for axis in _as_tuple(axes)]
        for axis in used:
            if axis not in AXES:
                hint = meant(str(axis), AXES)
                raise ConfigurationError(
                    f"XlaMesh({who}) names the axis {axis!r}. {f'{hint} ' if hint else ''}The axes are {', '.join(AXES)}."
                )
            if axis not in self.sizes:
                raise ConfigurationError(
                    f"XlaMesh({who}) names the axis {axis!r}, but the mesh is {str(self)!r}. Give the mesh that axis, or "
                    "take another."
                )
        if len(set(used)) < len(used):
            raise ConfigurationError(f"XlaMesh({who}) names an axis twice: {tuple(layout)}. Each cuts one dimension.")

    def _devices(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def _as_tuple(axes: Any) -> tuple[str, ...]:
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _unused(rules: Sequence[str], names: Sequence[str]) -> str:
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        f"XlaMesh(rules=...) has {', '.join(map(repr, rules))}, which no weight is called, or an earlier rule has taken those "
        f"that are. {meant(rules[0], names, f'The weights are {listed}.')} Correct the rule, or leave it out."
    )
