"""All flags of Hugging Face's `accelerate launch`, and their meaning here."""

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.cli.parser import spellings
from accelerate_nb.config.hf_keys import fp8_entries
from accelerate_nb.config.options import deepspeed, fsdp, megatron, parallelism
from accelerate_nb.config.options.entries import Entries, Entry
from accelerate_nb.config.value_types import Boolean, Integer, InvalidValue, OneOf, Text, ValueType
from accelerate_nb.errors import ConfigurationError, NotYetError


class ThreeBooleans(ValueType):
    """Three times yes or no: `false,false,true`."""

    PLACEHOLDER = "BOOL,BOOL,BOOL"
    expected = "three of true and false, such as 'false,false,true'"

    def parse(self, text: str) -> tuple[bool, ...]:
        parts = tuple(Boolean().parse(part) for part in text.split(","))
        if len(parts) != 3:
            raise InvalidValue
        return parts

    def check(self, value: Any) -> tuple[bool, ...]:
        if not isinstance(value, (list, tuple)):
            raise InvalidValue
        return self.parse(",".join(map(str, value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchingText(ValueType):
    """A text that matches a pattern as a whole."""

    PLACEHOLDER: str
    pattern: str
    expected: str

    def parse(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text, re.DOTALL):
            raise InvalidValue
        return text


# The streams to redirect: torchrun's number, or one for each rank.
_STREAMS = MatchingText(
    PLACEHOLDER="0-3",
    pattern=r"[0-3]|\d+:[0-3](,\d+:[0-3])*,?",
    expected="0 (none), 1 (stdout), 2 (stderr), 3 (both), or one for each rank, such as '0:3,1:1'",
)
_ASSIGNMENT = MatchingText(
    PLACEHOLDER="NAME=VALUE", pattern=r"[A-Za-z_]\w*=.*", expected="a name and a value, such as 'A=1'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFlag:
    """A flag of theirs: its name, the type of its value (`None`: it has none), and what it is here, which one of the other fields says."""

    name: str
    value_type: ValueType | None = None
    repeats: bool = False
    # its text in the help; the help leaves those out that have none
    help: str = ""
    # a setting of this package; its type is the setting's own
    setting: str = ""
    # one of `accelerate-nb launch` itself
    is_of_launch: bool = False
    # it gives settings of this package these values
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # it requests a feature whose options are the entries of this setting; `entries` are those that come with it
    feature: str = ""
    entries: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # an entry of this setting, which is a mapping
    entry_of: str = ""
    # variables of every worker, as Accelerate's own launch sets them; a value of several parts has one for each
    variables: tuple[str, ...] = ()
    # a field of `TpusConfig`, and the value of a flag without a value
    tpu: str = ""
    tpu_value: bool = True
    # why it changes nothing: an entry where its feature is not requested, a flag of TPUs elsewhere, others always
    idle: str = ""
    # whether a person expects that it changes nothing
    is_idle_as_expected: bool = False
    # what it requests that is not offered yet
    unsupported: str = ""


# Under what name a flag's values stand among the parsed arguments.
_PREFIX = "theirs:"
_WHOLE, _TEXT, _YES_NO = Integer(), Text(), Boolean()
_SETTINGS = (
    "cpu", "debug", "mixed_precision", "num_processes", "num_machines", "machine_rank", "main_process_ip",
    "main_process_port", "rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval", "gradient_accumulation_steps",
    "gpu_ids", "num_cpu_threads_per_process", "enable_cpu_affinity", "dynamo_backend", "dynamo_mode",
    "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation", "log_dir",
)  # fmt: skip
# Settings that have another name here.
_RENAMED = {
    "num_machines": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "use_port",
    "log_dir": "folder",
}
_FP8: dict[str, ValueType | None] = {
    "fp8_backend": OneOf(("ao", "te", "msamp")),
    "fp8_use_autocast_during_eval": None,
    "fp8_margin": _WHOLE,
    "fp8_interval": _WHOLE,
    "fp8_format": OneOf(("hybrid", "e4m3", "e5m2")),
    "fp8_amax_history_len": _WHOLE,
    "fp8_amax_compute_algo": OneOf(("max", "most_recent")),
    "fp8_opt_level": OneOf(("o1", "o2")),
    "fp8_enable_fsdp_float8_all_gather": _YES_NO,
    "fp8_pad_inner_dim": _YES_NO,
}
_OVERRIDDEN = ("ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD")


def _ignored(name: str, why: str, value_type: ValueType | None = None, *, repeats: bool = False) -> HfFlag:
    return HfFlag(name=name, value_type=value_type, idle=why, is_idle_as_expected=True, repeats=repeats)


def _of_tpus(name: str, tpu: str, value_type: ValueType | None = None, **details: Any) -> HfFlag:
    idle = "it is an option of a TPU, which --tpu requests"
    return HfFlag(name=name, value_type=value_type, tpu=tpu, idle=idle, **details)


def _entries(options: Entries, setting: str, feature: str, requested_by: str) -> Iterator[HfFlag]:
    """A flag for each key of a setting that is a mapping, but for those that Accelerate has none for, or that are settings, too."""
    idle = f"it is an option of {feature}, which {requested_by} requests"
    for name, entry in options.known.items():
        if name not in {"fsdp_ignored_modules", *_SETTINGS}:
            yield HfFlag(name=name, value_type=entry.value_type, entry_of=setting, idle=idle)


# In the order of their help.
FLAGS: tuple[HfFlag, ...] = (
    HfFlag(name="config_file", value_type=_TEXT, is_of_launch=True),
    *(HfFlag(name=name, is_of_launch=True) for name in ("quiet", "module", "no_python")),
    HfFlag(name="tee", value_type=_STREAMS, is_of_launch=True),
    *(HfFlag(name=name, setting=_RENAMED.get(name, name)) for name in _SETTINGS),
    _ignored("multi_gpu", "there is one process for each accelerator, unless --cpu is given"),
    _ignored("same_network", "machines meet at the address of node 0, whatever network they are in"),
    _ignored("role", "all processes have the one role that torchrun calls 'default'", _TEXT),
    # as there, version 1 is meant where no other is named
    HfFlag(name="use_fsdp", feature="fsdp_config", entries={"fsdp_version": 1}, settings={"strategy": "fsdp"}),
    *_entries(fsdp.OPTIONS, "fsdp_config", "FSDP", "--use_fsdp"),
    HfFlag(name="use_parallelism_config", feature="parallelism_config"),
    *_entries(parallelism.DEGREES, "parallelism_config", "a parallelism configuration", "--use_parallelism_config"),
    HfFlag(name="use_deepspeed", feature="deepspeed_config", settings={"strategy": "deepspeed"}),
    *_entries(deepspeed.OPTIONS, "deepspeed_config", "DeepSpeed", "--use_deepspeed"),
    *(_ignored(name, "processes are placed on machines by --engine", _TEXT) for name in deepspeed.PLACING),
    HfFlag(name="use_megatron_lm", feature="megatron_lm_config", settings={"strategy": "megatron"}),
    *_entries(megatron.OPTIONS, "megatron_lm_config", "Megatron", "--use_megatron_lm"),
    HfFlag(
        name="tpu",
        settings={"engine": "xla", "cpu": False},
        help="Compute on all chips of this machine's TPU, through torch_xla; as --engine xla.",
    ),
    _of_tpus(
        "tpu_cluster",
        "is_pod",
        help="Print the line that runs this on every machine of a TPU pod, and start nothing here.",
    ),
    # the one that a launch on a pod's own machines is given, and holds there whatever else is given
    _of_tpus("no_tpu_cluster", "is_pod", tpu_value=False),
    _of_tpus("tpu_use_sudo", "sudo", help="Run it with sudo on the machines of a pod."),
    _ignored("vm", "the machines of a TPU are reached by the TPU's own name", _TEXT, repeats=True),
    _of_tpus("env", "environment", _ASSIGNMENT, repeats=True, help="A variable on the machines of a pod."),
    _of_tpus(
        "main_training_function",
        "function",
        _TEXT,
        help="Import the script on each chip and call this function of it, in place of running the script.",
    ),
    _of_tpus("downcast_bf16", "downcasts", help="With bf16, let float64 become float32, not bfloat16."),
    HfFlag(name="mpirun_hostfile", value_type=_TEXT, unsupported="a launch by mpirun"),
    *(
        HfFlag(
            name=name,
            value_type=_TEXT,
            idle="it is an option of SageMaker, which a configuration file with compute_environment: AMAZON_SAGEMAKER requests",
        )
        for name in ("aws_access_key_id", "aws_secret_access_key")
    ),
    *(HfFlag(name=name, value_type=kind, variables=(f"ACCELERATE_{name.upper()}",)) for name, kind in _FP8.items()),
    HfFlag(name="fp8_override_linear_precision", value_type=ThreeBooleans(), variables=_OVERRIDDEN),
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

    def entries(self, setting: str) -> dict[str, Any]:
        """The entries of a setting that is a mapping."""
        return {flag.name: value for flag, value in self.given() if flag.entry_of == setting}

    def variables(self) -> dict[str, str]:
        """The environment variables that workers get because of them."""
        found: dict[str, str] = {}
        for flag, value in self.given():
            parts = value if isinstance(value, tuple) else (value,)
            found.update(zip(flag.variables, map(str, parts), strict=False))
        return found

    def without_effect(self, *, on_tpus: bool) -> dict[str, str]:
        """The flags that change nothing in a launch, which is on TPUs or not, and why."""
        return {
            f"--{flag.name}": flag.idle
            for flag, _ in self.given()
            if flag.idle and flag.entry_of not in self.in_use and not (flag.tpu and on_tpus)
        }

    def given(self) -> Iterator[tuple[HfFlag, Any]]:
        """The flags, each with its value."""
        return ((flag, self.values[flag.name]) for flag in FLAGS if flag.name in self.values)


def add_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Make the flags known that are no settings and none of launch's own; gives the heading that the help has, of TPUs."""
    shown = parser.add_argument_group("TPUs")
    for flag in FLAGS:
        if flag.setting or flag.is_of_launch:
            continue
        common: dict[str, Any] = {"dest": _PREFIX + flag.name, "default": argparse.SUPPRESS}
        if flag.value_type is None:
            common |= {"action": "store_const", "const": True}
        else:
            common |= {"action": "append" if flag.repeats else "store", "metavar": flag.value_type.PLACEHOLDER}
        first, *others = spellings(flag.name)
        (shown if flag.help else parser).add_argument(first, **common, help=flag.help or argparse.SUPPRESS)
        if others:
            parser.add_argument(*others, **common, help=argparse.SUPPRESS)
    return shown


def given_flags(arguments: argparse.Namespace, *, cpu: bool) -> HfFlagValues:
    """The values of these flags of a command line, checked; `cpu` is whether it requests the CPU, too."""
    texts = {name.removeprefix(_PREFIX): text for name, text in vars(arguments).items() if name.startswith(_PREFIX)}
    known = {flag.name: flag for flag in FLAGS}
    # torchrun's flag for what happens anyway: lines are shown, and kept in files
    _read(known["tee"], arguments.tee)
    together = [f"--{name}" for name in _EXCLUSIVE if name in texts or (name == "cpu" and cpu)]
    # weights are sharded on CPUs, too
    if len(together) > 1 and together not in (["--cpu", "--use_fsdp"], ["--cpu", "--use_deepspeed"]):
        raise ConfigurationError(
            f"{' and '.join(together)} were requested together, but they exclude each other. Pass one of them."
        )
    for name in texts:
        if unsupported := known[name].unsupported:
            raise NotYetError(
                f"--{name} requests {unsupported}, which is not offered here yet. Leave it out: every process keeps the "
                "whole model, and gradients are averaged."
            )
    return HfFlagValues(
        {
            name: tuple(_read(flag, item) for item in text) if (flag := known[name]).repeats else _read(flag, text)
            for name, text in texts.items()
        }
    )


def fp8_values(content: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The values that a configuration file's `fp8_config` gives to these flags; a variable that is set wins over it."""
    known = {flag.name: flag for flag in FLAGS if flag.name.startswith("fp8_")}
    entries = {name: Entry(flag.value_type or _YES_NO, flag.variables[0]) for name, flag in known.items()}
    try:
        found = Entries(prefix="fp8_", known=entries).check(fp8_entries(content))
    except InvalidValue as unfit:
        raise ConfigurationError(
            f"fp8_config in the configuration file can't be read. {unfit} Correct it, or remove the line."
        ) from None
    return {
        name: value.upper() if name in _IN_CAPITALS else value
        for name, value in found.items()
        if environment.keys().isdisjoint(known[name].variables)
    }


def _read(hf_flag: HfFlag, text: Any) -> Any:
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
