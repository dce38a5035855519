"""The preflight check of a launch: settings that don't fit this machine, or each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.run_config import RunConfig, all_settings, resolve
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.launching.planning.placement import Placement, choose_placement


@dataclass(frozen=True, slots=True)
class PreflightIssue:
    """A reason why a launch would fail (`grave`), or be slower than it need be; `name` is the setting to change."""

    name: str | None
    text: str
    grave: bool = True


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """The result of a preflight: the configuration, its placement, and the objections to it."""

    config: RunConfig | None
    choice: Placement | None
    objections: tuple[PreflightIssue, ...]

    @property
    def possible(self) -> bool:
        """Whether there is no grave objection."""
        return not any(objection.grave for objection in self.objections)


def run_preflight(settings: Mapping[str, Any], devices: AvailableDevices, can_fork: bool) -> PreflightReport:
    """
    Check a launch with these settings on a machine with these devices; pure, and raises nothing.

    The texts are those of the errors that the launch would raise.
    """
    try:
        config = resolve(settings, {})
    except AccelerateNbError as error:
        return PreflightReport(None, None, _wrong(settings, str(error)))
    try:
        choice = choose_placement(config, devices, can_fork)
    except AccelerateNbError as error:
        return PreflightReport(config, None, (PreflightIssue(_named_in(str(error)), str(error)),))
    return PreflightReport(config, choice, _advice(config, choice, devices))


def _wrong(settings: Mapping[str, Any], error: str) -> tuple[PreflightIssue, ...]:
    """The errors of settings, each by itself; an error of several together stands at the setting that it begins with."""
    together = PreflightIssue(_named_in(error), error)
    alone = [found for name, value in settings.items() if (found := _alone(name, value)) is not None]
    if together.name is None and alone:
        return tuple(alone)
    return (together, *(found for found in alone if found.name != together.name and found.text != error))


def _alone(name: str, value: Any) -> PreflightIssue | None:
    """The error of one setting, whatever the others are."""
    try:
        resolve({name: value}, {})
    except AccelerateNbError as error:
        return PreflightIssue(name, str(error))
    return None


def _named_in(text: str) -> str | None:
    """The setting that an error's text begins with, as in "num_processes=8 was requested"."""
    return next((setting.name for setting in all_settings() if text.startswith(f"{setting.name}=")), None)


def _advice(config: RunConfig, choice: Placement, devices: AvailableDevices) -> tuple[PreflightIssue, ...]:
    """Objections to what works, and is not what one would want."""
    found = []
    if choice.cpu and choice.size > devices.cores:
        cores = f"{devices.cores} CPU core{'s' if devices.cores > 1 else ''}"
        text = f"{choice.size} processes would share {cores}: that works, and is no faster than fewer."
        found.append(PreflightIssue("num_processes", text, grave=False))
    if choice.cpu and config.training.mixed_precision == "fp16":
        text = "On the CPU fp16 is seldom faster, and overflows as on a GPU: bf16 has the range of float32."
        found.append(PreflightIssue("mixed_precision", text, grave=False))
    if choice.kind == "xla" and config.training.mixed_precision == "fp16":
        text = "TPUs compute in bf16, and on fp16 they overflow as a GPU does, without being faster: bf16 has the range of float32."
        found.append(PreflightIssue("mixed_precision", text, grave=False))
    if config.training.fsdp_config is not None and config.training.strategy != "fsdp":
        text = "These are options of strategy='fsdp', which was not requested: every rank has the whole model."
        found.append(PreflightIssue("fsdp_config", text, grave=False))
    if config.training.deepspeed_config is not None and config.training.strategy != "deepspeed":
        text = "These are options of strategy='deepspeed', which was not requested: every rank has the whole model."
        found.append(PreflightIssue("deepspeed_config", text, grave=False))
    if config.training.megatron_lm_config and config.training.strategy != "megatron":
        text = "These are options of strategy='megatron', which was not requested: every rank has the whole model."
        found.append(PreflightIssue("megatron_lm_config", text, grave=False))
    return tuple(found)
