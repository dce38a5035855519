"""What speaks against a launch before there is one: settings that don't fit this machine, or each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.run import RunConfig, all_settings, resolve
from accelerate_nb.devices.base import Devices
from accelerate_nb.errors import AccelerateNbError, LaunchError
from accelerate_nb.launching.choosing import Choice, choose


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a launch would fail (`grave`), or would be slower than it need be; `name` is the setting to change."""

    name: str | None
    text: str
    grave: bool = True


@dataclass(frozen=True, slots=True)
class Outlook:
    """What would become of a launch: what is to be launched, how, and what speaks against it."""

    config: RunConfig | None
    choice: Choice | None
    objections: tuple[Objection, ...]

    @property
    def possible(self) -> bool:
        """Whether nothing grave speaks against it."""
        return not any(one.grave for one in self.objections)


def look_ahead(said: Mapping[str, Any], devices: Devices, can_fork: bool) -> Outlook:
    """
    What would become of a launch with these settings on a machine with these devices; pure, and raises nothing.

    The texts are those of the errors that the launch would raise.
    """
    wrong = tuple(found for name, value in said.items() if (found := _alone(name, value)) is not None)
    if wrong:
        return Outlook(None, None, wrong)
    try:
        config = resolve(said, {})
    except AccelerateNbError as error:
        return Outlook(None, None, (Objection(_named_in(str(error)), str(error)),))
    try:
        choice = choose(config.launching, devices, can_fork, config.training.xla_mesh)
    except LaunchError as error:
        return Outlook(config, None, (Objection(_named_in(str(error)), str(error)),))
    return Outlook(config, choice, _advice(config, choice, devices))


def _alone(name: str, value: Any) -> Objection | None:
    """What is wrong with one setting whatever the others are."""
    try:
        resolve({name: value}, {})
    except AccelerateNbError as error:
        return Objection(name, str(error))
    return None


def _named_in(text: str) -> str | None:
    """The setting that an error's text begins with, as in "num_processes=8 was asked for"."""
    return next((one.name for one in all_settings() if text.startswith(f"{one.name}=")), None)


def _advice(config: RunConfig, choice: Choice, devices: Devices) -> tuple[Objection, ...]:
    """What works, and is not what one would want."""
    found = []
    if choice.cpu and choice.size > devices.cores:
        cores = f"{devices.cores} CPU core{'s' if devices.cores > 1 else ''}"
        text = f"{choice.size} processes would share {cores}: that works, and is no faster than fewer."
        found.append(Objection("num_processes", text, grave=False))
    if choice.cpu and config.training.mixed_precision == "fp16":
        text = "On the CPU fp16 is seldom faster, and overflows as on a GPU: bf16 has the range of float32."
        found.append(Objection("mixed_precision", text, grave=False))
    if choice.kind == "xla" and config.training.mixed_precision == "fp16":
        text = "TPUs compute in bf16, and on fp16 they overflow as a GPU does, without being faster: bf16 has the range of float32."
        found.append(Objection("mixed_precision", text, grave=False))
    if choice.kind != "xla" and config.training.xla_mesh is not None:
        text = "Nothing here asks for torch_xla, whose devices it shards over: every rank has the whole model."
        found.append(Objection("xla_mesh", text, grave=False))
    return tuple(found)
