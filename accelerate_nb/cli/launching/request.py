"""The request of one `accelerate-nb launch`: its flags, with the environment and the configuration file."""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate_nb.cli import hf_flags
from accelerate_nb.cli.hf_flags import HfFlagValues
from accelerate_nb.cli.parser import given_settings
from accelerate_nb.config import hf_files, hf_keys
from accelerate_nb.config.environment import already_launched
from accelerate_nb.config.hf_keys import TpusConfig
from accelerate_nb.config.run_config import RunConfig, grouped, resolve
from accelerate_nb.errors import ConfigurationError, LaunchError

PROG = "accelerate-nb launch"


# `--quiet` is Accelerate's flag for less output, so the seconds had the name `--quiet-seconds`.
_AS_FLAGS: dict[str, dict[str, Any]] = {
    "hang_warning_after": {"keys": ("hang_warning_after", "quiet_seconds"), "deprecated": ("quiet_seconds",)},
    "folder": {"keys": ("folder", "log_dir")},
}
SETTINGS = tuple(replace(item, **_AS_FLAGS.get(item.name, {})) for item in chain.from_iterable(grouped().values()))


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The request of a command line, and the configuration that it gives with the environment and the file."""

    settings: Mapping[str, Any]
    file: Path | None
    content: Mapping[str, Any] | None
    config: RunConfig
    theirs: HfFlagValues
    only_ranks: tuple[int, ...] | None
    quiet: bool
    tpus: TpusConfig
    on_tpus: bool

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the workers' environment beyond the settings."""
        more = self.tpus.variables(self.config.training.mixed_precision) if self.on_tpus else {}
        return {**more, **self.theirs.variables()}

    @property
    def function(self) -> str | None:
        """The function of the program that each worker calls, in place of running it."""
        return self.tpus.function if self.on_tpus else None

    @property
    def is_for_a_pod(self) -> bool:
        """Whether each machine of a TPU pod is to run it."""
        return self.on_tpus and self.tpus.is_pod

    def warn_of_unused_flags(self) -> None:
        """Warn about given flags that change nothing."""
        expected = {f"--{flag.name}" for flag in hf_flags.FLAGS if flag.is_idle_as_expected}
        for flag, why in self.theirs.without_effect(on_tpus=self.on_tpus).items():
            if flag not in expected:
                print(f"{PROG}: {flag} changes nothing: {why}.", file=sys.stderr)


def read_request(arguments: argparse.Namespace) -> LaunchRequest:
    """The request of a parsed command line; `ConfigurationError` names what can't be so."""
    settings = given_settings(arguments, SETTINGS)
    flags = hf_flags.given_flags(arguments, cpu=bool(settings.get("cpu")))
    for word, name, value in [(flag.name, *setting) for flag, _ in flags.given() for setting in flag.settings.items()]:
        if settings.setdefault(name, value) != value:
            raise ConfigurationError(
                f"--{word} was given, which requests {name}={value}, together with {name}={settings[name]}. Leave one of them out."
            )
    file = hf_files.find(os.environ, arguments.config_file)
    content = hf_files.read(file) if file is not None else None
    config = resolve(settings, os.environ, content)
    if entries := _entries(flags, config):
        settings |= entries
        flags = replace(flags, in_use=frozenset(entries))
        config = resolve(settings, os.environ, content)
    if config.training.mixed_precision == "fp8":
        flags = replace(flags, values={**hf_flags.fp8_values(content or {}, os.environ), **flags.values})
    if already_launched(os.environ):
        raise LaunchError(
            f"A launch was requested inside rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, which a launcher started "
            "already. Run the script itself there, or unset RANK and WORLD_SIZE."
        )
    launching = config.launching
    on_tpus = launching.engine == "xla"
    if launching.engine == "auto" and not launching.cpu:
        from accelerate_nb.devices.probe import probe

        on_tpus = probe().kind == "xla"
    tpus = TpusConfig()
    if on_tpus:
        named = {"name": arguments.tpu_name, "zone": arguments.tpu_zone}
        # a named TPU means that one, and not this machine's
        given: dict[str, Any] = {"is_pod": True} if arguments.tpu_name else {}
        for flag, value in flags.given():
            if flag.tpu:
                given[flag.tpu] = flag.tpu_value if flag.value_type is None else value
        given |= {name: value for name, value in named.items() if value is not None}
        tpus = replace(hf_keys.tpus_of(content or {}), **given)
    return LaunchRequest(
        settings=settings,
        file=file,
        content=content,
        config=config,
        theirs=flags,
        only_ranks=_ranks(arguments.only_rank),
        quiet=arguments.quiet,
        tpus=tpus,
        on_tpus=on_tpus,
    )


def _entries(flags: HfFlagValues, config: RunConfig) -> dict[str, dict[str, Any]]:
    """The settings that are mappings, with the entries that flags give them, where what they are options of is requested."""
    training = config.training
    features = {flag.feature: flag.entries for flag, _ in flags.given() if flag.feature}
    present = {
        "fsdp_config": training.strategy == "fsdp",
        "deepspeed_config": training.strategy == "deepspeed",
        "megatron_lm_config": training.strategy == "megatron",
        "parallelism_config": training.parallelism_config is not None,
    }
    return {
        name: {**features.get(name, {}), **(getattr(training, name) or {}), **flags.entries(name)}
        for name, is_present in present.items()
        if name in features or (is_present and flags.entries(name))
    }


def _ranks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigurationError(
            f"--only-rank was given {text!r}, but should be ranks, such as 0 or 0,2. Leave it out to see every rank's lines."
        )
    return tuple(map(int, parts))


def check_ranks(request: LaunchRequest, size: int) -> None:
    """Raise where `--only-rank` names a rank that does not exist."""
    if beyond := [rank for rank in request.only_ranks or () if rank >= size]:
        raise ConfigurationError(
            f"--only-rank {beyond[0]} was requested, but there are only ranks 0 to {size - 1}. Name one of them."
        )
