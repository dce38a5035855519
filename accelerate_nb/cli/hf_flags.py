"""All flags of Hugging Face's `accelerate launch`, and their meaning here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from accelerate_nb.cli.parser import spellings
from accelerate_nb.config.options import deepspeed, fsdp, megatron, parallelism
from accelerate_nb.config.options.entries import Entries
from accelerate_nb.config.value_types import Boolean, Integer, InvalidValue, Number, OneOf, Text, ValueType
from accelerate_nb.errors import ConfigurationError, NotYetError


@dataclass(frozen=True, slots=True)
class SettingFlag:
    """The flag is a setting of this package."""

    name: str


@dataclass(frozen=True, slots=True)
class LaunchFlag:
    """The flag is one of `accelerate-nb launch` itself."""


@dataclass(frozen=True, slots=True)
class EnvironmentFlag:
    """The flag is a variable in the environment of every worker, as Accelerate's own launch sets it."""

    names: tuple[str, ...]

    def of(self, value: Any) -> dict[str, str]:
        """The variables for a value; a list has one for each of its parts."""
        values = value if isinstance(value, tuple) else (value,)
        return dict(zip(self.names, map(str, values), strict=True))


@dataclass(frozen=True, slots=True)
class FixedSettingsFlag:
    """The flag gives settings of this package these values."""

    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TpuFlag:
    """The flag is a TPU setting (a field of `TpusConfig`), which matters only for a launch on TPUs."""

    field: str
    # the value of a flag without a value
    value: bool = True

    @property
    def why(self) -> str:
        """The reason for which it changes nothing elsewhere."""
        return "it is an option of a TPU, which --tpu requests"


@dataclass(frozen=True, slots=True)
class IgnoredFlag:
    """The flag changes nothing here."""

    why: str


@dataclass(frozen=True, slots=True)
class OptionOfUnused:
    """The flag is an option of a feature that was not requested: it changes nothing, here as there."""

    what: str
    requested_by: str

    @property
    def why(self) -> str:
        """The reason."""
        return f"it is an option of {self.what}, which {self.requested_by} requests"


@dataclass(frozen=True, slots=True)
class EntryFlag(OptionOfUnused):
    """The flag is an entry of a setting that is a mapping, where its feature was requested."""

    setting: str


@dataclass(frozen=True, slots=True)
class FeatureFlag:
    """The flag requests a feature whose options are the entries of a setting; `entries` are those that come with it."""

    setting: str
    entries: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnsupportedFlag:
    """The flag requests a feature that is not offered yet."""

    what: str


Becomes: TypeAlias = (
    SettingFlag
    | LaunchFlag
    | FixedSettingsFlag
    | TpuFlag
    | EnvironmentFlag
    | IgnoredFlag
    | OptionOfUnused
    | EntryFlag
    | FeatureFlag
    | UnsupportedFlag
)


@dataclass(frozen=True, slots=True)
class ThreeBooleans:
    """Three times yes or no: `false,false,true`."""

    PLACEHOLDER: ClassVar[str] = "BOOL,BOOL,BOOL"
    expected: ClassVar[str] = "three of true and false, such as 'false,false,true'"

    def check(self, value: Any) -> tuple[bool, ...]:
        """The values, from their text."""
        return self.parse(str(value))

    def parse(self, text: str) -> tuple[bool, ...]:
        """The values."""
        parts = tuple(Boolean().parse(part) for part in text.split(","))
        if len(parts) != 3:
            raise InvalidValue
        return parts


class _MatchingText:
    """A text that matches a pattern as a whole."""

    PATTERN: ClassVar[str]
    expected: ClassVar[str]

    def check(self, value: Any) -> str:
        """The text, where it is one."""
        return self.parse(str(value))

    def parse(self, text: str) -> str:
        """The text, where it is one."""
        if not re.fullmatch(self.PATTERN, text, re.DOTALL):
            raise InvalidValue
        return text


class RedirectedStreams(_MatchingText):
    """The streams to redirect: torchrun's number (0 none, 1 stdout, 2 stderr, 3 both), or one for each rank."""

    PLACEHOLDER: ClassVar[str] = "0-3"
    PATTERN = r"[0-3]|\d+:[0-3](,\d+:[0-3])*,?"
    expected = "0 (none), 1 (stdout), 2 (stderr), 3 (both), or one for each rank, such as '0:3,1:1'"


class Assignment(_MatchingText):
    """A variable of the environment with its value."""

    PLACEHOLDER: ClassVar[str] = "NAME=VALUE"
    PATTERN = r"[A-Za-z_]\w*=.*"
    expected = "a name and a value, such as 'A=1'"


@dataclass(frozen=True, slots=True)
class HfFlag:
    """A flag of theirs: how it is written, which values it takes (`None`: none), and what becomes of it."""

    name: str
    becomes: Becomes
    value_type: ValueType | None = None
    repeats: bool = False
    # its text in the help; the help leaves those out that have none
    help: str = ""


# ---------------------------------------------------------------------------------------------------------- the flags


# Under what name a flag's values stand among the parsed arguments.
_PREFIX = "theirs:"


def _options(becomes: Becomes, **value_types: ValueType | None) -> Iterator[HfFlag]:
    """Flags of which the same becomes."""
    return (HfFlag(name, becomes, value_type) for name, value_type in value_types.items())


def _fp8(**value_types: ValueType | None) -> Iterator[HfFlag]:
    """Flags that are a variable of the same name."""
    return (
        HfFlag(name, EnvironmentFlag((f"ACCELERATE_{name.upper()}",)), value_type)
        for name, value_type in value_types.items()
    )


def _entries(mapping: Entries, becomes: EntryFlag) -> Iterator[HfFlag]:
    """A flag for each key of a mapping; of one key Accelerate has none."""
    return (
        HfFlag(name, becomes, entry.value_type)
        for name, entry in mapping.known.items()
        if name != "fsdp_ignored_modules"
    )


_WHOLE, _NUMBER, _TEXT, _YES_NO = Integer(), Number(), Text(), Boolean()
_SETTINGS = (
    "cpu", "debug", "mixed_precision", "num_processes", "num_machines", "machine_rank", "main_process_ip",
    "main_process_port", "rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval", "gradient_accumulation_steps",
    "gpu_ids", "num_cpu_threads_per_process", "enable_cpu_affinity", "dynamo_backend", "dynamo_mode",
    "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation",
)  # fmt: skip
# Settings that have another name here.
_RENAMED = {
    "num_machines": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "use_port",
    "log_dir": "folder",
}

# In the order of their help. The types of settings are the settings' own.
FLAGS: tuple[HfFlag, ...] = (
    *_options(LaunchFlag(), config_file=_TEXT, quiet=None, module=None, no_python=None, tee=RedirectedStreams()),
    *(HfFlag(name, SettingFlag(_RENAMED.get(name, name))) for name in (*_SETTINGS, "log_dir")),
    HfFlag("multi_gpu", IgnoredFlag("there is one process for each accelerator, unless --cpu is given")),
    HfFlag("same_network", IgnoredFlag("machines meet at the address of node 0, whatever network they are in")),
    HfFlag("role", IgnoredFlag("all processes have the one role that torchrun calls 'default'"), _TEXT),
    # as there, version 1 is meant where no other is named
    HfFlag("use_fsdp", FeatureFlag("fsdp_config", {"fsdp_version": 1}, {"strategy": "fsdp"})),
    *_entries(fsdp.OPTIONS, EntryFlag("FSDP", "--use_fsdp", "fsdp_config")),
    HfFlag("use_parallelism_config", FeatureFlag("parallelism_config", {}, {})),
    *_entries(
        parallelism.DEGREES,
        EntryFlag("a parallelism configuration", "--use_parallelism_config", "parallelism_config"),
    ),
    HfFlag("use_deepspeed", FeatureFlag("deepspeed_config", {}, {"strategy": "deepspeed"})),
    *(
        item
        for item in _entries(deepspeed.OPTIONS, EntryFlag("DeepSpeed", "--use_deepspeed", "deepspeed_config"))
        # a setting of its own
        if item.name != "gradient_accumulation_steps"
    ),
    *_options(
        IgnoredFlag("processes are placed on machines by --engine"),
        **dict.fromkeys(deepspeed.PLACING, _TEXT),
    ),
    HfFlag("use_megatron_lm", FeatureFlag("megatron_lm_config", {}, {"strategy": "megatron"})),
    *_entries(megatron.OPTIONS, EntryFlag("Megatron", "--use_megatron_lm", "megatron_lm_config")),
    HfFlag(
        "tpu",
        FixedSettingsFlag({"engine": "xla", "cpu": False}),
        help="Compute on all cores of this machine's TPU, through torch_xla; as --engine xla.",
    ),
    HfFlag(
        "tpu_cluster",
        TpuFlag("is_pod"),
        help="Print the line that runs this on every machine of a TPU pod, and start nothing here.",
    ),
    # the one that a launch on a pod's own machines is given, and holds there whatever else is given
    HfFlag("no_tpu_cluster", TpuFlag("is_pod", value=False)),
    HfFlag("tpu_use_sudo", TpuFlag("sudo"), help="Run it with sudo on the machines of a pod."),
    HfFlag("vm", IgnoredFlag("the machines of a TPU are reached by the TPU's own name"), _TEXT, repeats=True),
    HfFlag("env", TpuFlag("environment"), Assignment(), repeats=True, help="A variable on the machines of a pod."),
    HfFlag(
        "main_training_function",
        TpuFlag("function"),
        _TEXT,
        help="Import the script on each core and call this function of it, in place of running the script.",
    ),
    HfFlag("downcast_bf16", TpuFlag("downcasts"), help="With bf16, let float64 become float32, not bfloat16."),
    HfFlag("mpirun_hostfile", UnsupportedFlag("a launch by mpirun"), _TEXT),
    *_options(
        OptionOfUnused("SageMaker", "a configuration file with compute_environment: AMAZON_SAGEMAKER"),
        aws_access_key_id=_TEXT,
        aws_secret_access_key=_TEXT,
    ),
    *_fp8(
        fp8_backend=OneOf(("ao", "te", "msamp")),
        fp8_use_autocast_during_eval=None,
        fp8_margin=_WHOLE,
        fp8_interval=_WHOLE,
        fp8_format=OneOf(("hybrid", "e4m3", "e5m2")),
        fp8_amax_history_len=_WHOLE,
        fp8_amax_compute_algo=OneOf(("max", "most_recent")),
        fp8_opt_level=OneOf(("o1", "o2")),
        fp8_enable_fsdp_float8_all_gather=_YES_NO,
        fp8_pad_inner_dim=_YES_NO,
    ),
    HfFlag(
        "fp8_override_linear_precision",
        EnvironmentFlag(
            ("ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD")
        ),
        ThreeBooleans(),
    ),
)
# Their choices are written in capitals, and so are the variables.
_IN_CAPITALS = {"fp8_format", "fp8_opt_level"}
# Flags that exclude each other.
_EXCLUSIVE = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")


@dataclass(frozen=True, slots=True)
class HfFlagValues:
    """The values of Accelerate's flags that are no settings here; `in_use` are the mappings that their entries are part of."""

    values: Mapping[str, Any]
    in_use: frozenset[str] = frozenset()

    def settings(self) -> dict[str, tuple[str, Any]]:
        """Their settings of this package, each with the flag that requests it and its value."""
        return {
            name: (f"--{item.name}", value)
            for item, _ in self._given()
            if isinstance(item.becomes, (FixedSettingsFlag, FeatureFlag))
            for name, value in item.becomes.settings.items()
        }

    def features(self) -> dict[str, Mapping[str, Any]]:
        """The settings that are options of the requested features, with the entries that come with these."""
        return {
            item.becomes.setting: item.becomes.entries
            for item, _ in self._given()
            if isinstance(item.becomes, FeatureFlag)
        }

    def entries(self, setting: str) -> dict[str, Any]:
        """The entries of a setting that is a mapping."""
        return {
            item.name: value
            for item, value in self._given()
            if isinstance(item.becomes, EntryFlag) and item.becomes.setting == setting
        }

    def tpus(self) -> dict[str, Any]:
        """Their TPU settings, by the fields of `TpusConfig`."""
        found: dict[str, Any] = {}
        for item, value in self._given():
            if isinstance(item.becomes, TpuFlag):
                found[item.becomes.field] = item.becomes.value if item.value_type is None else value
        return found

    def variables(self) -> dict[str, str]:
        """The environment variables that workers get because of them."""
        found: dict[str, str] = {}
        for item, value in self._given():
            if isinstance(item.becomes, EnvironmentFlag):
                found.update(item.becomes.of(value))
        return found

    def without_effect(self, *, on_tpus: bool) -> dict[str, str]:
        """The flags that change nothing in a launch, which is on TPUs or not, and why."""
        idle = (IgnoredFlag, OptionOfUnused) if on_tpus else (IgnoredFlag, OptionOfUnused, TpuFlag)
        return {
            f"--{item.name}": item.becomes.why
            for item, _ in self._given()
            if isinstance(item.becomes, idle)
            if not (isinstance(item.becomes, EntryFlag) and item.becomes.setting in self.in_use)
        }

    def surprises(self, *, on_tpus: bool) -> list[str]:
        """Those of them that a user would not expect."""
        expected = {f"--{item.name}" for item in FLAGS if isinstance(item.becomes, IgnoredFlag)}
        found = self.without_effect(on_tpus=on_tpus).items()
        return [f"{flag} changes nothing: {why}." for flag, why in found if flag not in expected]

    def _given(self) -> Iterator[tuple[HfFlag, Any]]:
        return ((flag, self.values[flag.name]) for flag in FLAGS if flag.name in self.values)


def add_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """
    Make those flags known that are no settings and none of launch's own; the help has those of TPUs alone.

    Gives the heading under which it has them.
    """
    shown = parser.add_argument_group("TPUs")
    for flag in FLAGS:
        if not isinstance(flag.becomes, (SettingFlag, LaunchFlag)):
            _add(shown if flag.help else parser, flag)
    return shown


def _add(parser: argparse._ActionsContainer, hf_flag: HfFlag) -> None:
    first, *others = spellings(hf_flag.name)
    common: dict[str, Any] = {"dest": _PREFIX + hf_flag.name, "default": argparse.SUPPRESS}
    if hf_flag.value_type is None:
        common |= {"action": "store_const", "const": True}
    else:
        common |= {"action": "append" if hf_flag.repeats else "store", "metavar": hf_flag.value_type.PLACEHOLDER}
    parser.add_argument(first, **common, help=hf_flag.help or argparse.SUPPRESS)
    if others:
        parser.add_argument(*others, **common, help=argparse.SUPPRESS)


def given_flags(arguments: argparse.Namespace, *, cpu: bool) -> HfFlagValues:
    """
    The values of these flags of a command line, checked; `cpu` is whether it requests the CPU, too.

    `ConfigurationError` names an invalid value, and flags that exclude each other; `NotYetError` a feature that is not
    offered.
    """
    texts = {name.removeprefix(_PREFIX): text for name, text in vars(arguments).items() if name.startswith(_PREFIX)}
    known = {flag.name: flag for flag in FLAGS}
    together = [f"--{name}" for name in _EXCLUSIVE if name in texts or (name == "cpu" and cpu)]
    # weights are sharded on CPUs, too
    if len(together) > 1 and together not in (["--cpu", "--use_fsdp"], ["--cpu", "--use_deepspeed"]):
        raise ConfigurationError(
            f"{' and '.join(together)} were requested together, but they exclude each other. Pass one of them."
        )
    for name in texts:
        if isinstance(unsupported := known[name].becomes, UnsupportedFlag):
            raise NotYetError(
                f"--{name} requests {unsupported.what}, which is not offered here yet. Leave it out: every process keeps the "
                "whole model, and gradients are averaged."
            )
    return HfFlagValues({name: _value(known[name], text) for name, text in texts.items()})


def _value(hf_flag: HfFlag, text: Any) -> Any:
    """The value of a flag's text, or those of its texts."""
    return tuple(read(hf_flag, item) for item in text) if hf_flag.repeats else read(hf_flag, text)


def read(hf_flag: HfFlag, text: Any) -> Any:
    """The value of a flag's text."""
    if hf_flag.value_type is None:
        return True
    try:
        value = hf_flag.value_type.parse(text)
    except InvalidValue:
        raise ConfigurationError(
            f"--{hf_flag.name} was given {text!r}, but should be {hf_flag.value_type.expected}. Pass such a value, or leave it out."
        ) from None
    return value.upper() if hf_flag.name in _IN_CAPITALS else value


def check_streams(text: str) -> None:
    """Raise `ConfigurationError` where `--tee` names no streams."""
    (tee,) = (flag for flag in FLAGS if flag.name == "tee")
    read(tee, text)
