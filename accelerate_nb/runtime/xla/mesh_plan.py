"""The layout of each tensor on the devices of one process; decided without a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Module

from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.config.xla_mesh import AXES, sizes
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.kwargs_handlers import KwargsHandler

# For each dimension of a tensor the axis along which it is cut, several axes, or `None` for a dimension that is whole everywhere.
Layout = tuple[str | tuple[str, ...] | None, ...]

VARIABLE = "ACCELERATE_NB_XLA_MESH"
# The axes along which devices have different samples.
_OF_BATCHES = ("data", "fsdp")


@dataclass
class XlaMesh(KwargsHandler):
    """
    The mesh of one process that drives all of its XLA devices, for `Accelerator(kwargs_handlers=[...])`: torch_xla's SPMD.

    `axes` is the setting `xla_mesh`, and is taken from there where it is left out: "data" gives each device other
    samples, "fsdp" also another part of each weight, "tensor" another part of the weights that a rule names. `rules` maps names
    of weights, with `*`, to the axis of each dimension. Weights that no rule names are cut along "fsdp" in the first dimension
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
class MeshPlan:
    """An `XlaMesh` on so many devices: `sizes` has the axes in their order."""

    config: XlaMesh
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, config: XlaMesh, devices: int) -> MeshPlan:
        """The plan for a machine; `ConfigurationError` where the mesh does not fit its devices, or a rule the mesh."""
        assert config.axes is not None
        plan = cls(config, sizes(config.axes, devices))
        for field_name, layouts in (("rules", config.rules), ("inputs", config.inputs)):
            for name, layout in layouts.items():
                plan._check_axes(f"{field_name}[{name!r}]", layout)
        return plan

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    def of_model(self, model: Module) -> dict[str, Layout]:
        """The layout of each weight and each buffer, under all of its names; a tied weight has the layout of the first rule."""
        names: dict[int, list[str]] = {}
        layouts: dict[str, Layout] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), []).append(name)
        unused = set(self.config.rules)
        for weight_names in names.values():
            shape = model.get_parameter(weight_names[0]).shape
            rule = next(
                (item for item in self.config.rules if any(fnmatchcase(name, item) for name in weight_names)), None
            )
            layout = self._of_weight(shape)
            if rule is not None:
                unused.discard(rule)
                layout = self._ruled(f"The rule {rule!r} for {weight_names[0]!r}", self.config.rules[rule], shape)
            layouts.update(dict.fromkeys(weight_names, layout))
        if unused:
            raise ConfigurationError(_unused(sorted(unused), list(layouts)))
        # explicit, because the compiler would choose for what is written to
        buffers = model.named_buffers(remove_duplicate=False)
        return layouts | {name: (None,) * buffer.ndim for name, buffer in buffers}

    def of_input(self, shape: Sequence[int], key: str | None = None) -> Layout:
        """The layout of a tensor of a batch; where its rows do not divide by the devices, by as many of them as do."""
        if key is not None and key in self.config.inputs:
            return self._ruled(f"XlaMesh(inputs=...) for {key!r}", self.config.inputs[key], shape)
        return () if not shape else (self._of_rows(shape[0]), *[None] * (len(shape) - 1))

    def _of_rows(self, rows: int) -> str | tuple[str, ...] | None:
        batch_axes = tuple(axis for axis in _OF_BATCHES if axis in self.sizes)
        ways = [batch_axes, *((axis,) for axis in sorted(batch_axes, key=lambda axis: -self.sizes[axis]))]
        best = next((axes for axes in ways if axes and rows and rows % self._devices(axes) == 0), ())
        return best[0] if len(best) == 1 else best or None

    def _of_weight(self, shape: Sequence[int]) -> Layout:
        layout: list[str | None] = [None] * len(shape)
        size = self.sizes.get("fsdp", 1)
        if size > 1 and math.prod(shape) >= self.config.min_size:
            for dim, length in enumerate(shape):
                if length and length % size == 0:
                    layout[dim] = "fsdp"
                    break
        return tuple(layout)

    def _ruled(self, label: str, layout: Sequence[Any], shape: Sequence[int]) -> Layout:
        entries = tuple(tuple(item) if isinstance(item, list) else item for item in layout)
        if len(entries) != len(shape):
            raise ConfigurationError(
                f"{label} has {len(entries)} entries, {entries}, but the tensor's shape is {tuple(shape)}. Give one for each dimension."
            )
        for length, axes in zip(shape, entries, strict=True):
            if length % self._devices(_as_tuple(axes)):
                raise ConfigurationError(
                    f"{label} cuts a dimension of {length} along {axes!r}, which has {self._devices(_as_tuple(axes))} devices. "
                    "Cut another dimension, or make it a multiple."
                )
        return entries

    def _check_axes(self, label: str, layout: Sequence[Any]) -> None:
        if isinstance(layout, str):
            raise ConfigurationError(
                f"XlaMesh({label}) is {layout!r}, but should have an axis or None for each dimension: ({layout!r}, None)."
            )
        used = [axis for axes in layout for axis in _as_tuple(axes)]
        for axis in used:
            if axis not in AXES:
                suggestion = did_you_mean(str(axis), AXES)
                raise ConfigurationError(
                    f"XlaMesh({label}) names the axis {axis!r}. {f'{suggestion} ' if suggestion else ''}The axes are {', '.join(AXES)}."
                )
            if axis not in self.sizes:
                raise ConfigurationError(
                    f"XlaMesh({label}) names the axis {axis!r}, but the mesh is {str(self)!r}. Give the mesh that axis, or "
                    "take another."
                )
        if len(set(used)) < len(used):
            raise ConfigurationError(f"XlaMesh({label}) names an axis twice: {tuple(layout)}. Each cuts one dimension.")

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
        f"that are. {did_you_mean(rules[0], names, f'The weights are {listed}.')} Correct the rule, or leave it out."
    )
