"""What becomes of every flag of Hugging Face's `accelerate launch`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from accelerate_nb.config.kinds import Kind, Number, OneOf, Text, Unfit, Whole, YesNo
from accelerate_nb.errors import ConfigurationError, NotYetError

# Under what name a flag's values stand among the parsed arguments.
_PREFIX = "theirs:"


@dataclass(frozen=True, slots=True)
class ASetting:
    """The flag says a setting of this package."""

    name: str


@dataclass(frozen=True, slots=True)
class OfLaunch:
    """The flag is one of `accelerate-nb launch` itself."""


@dataclass(frozen=True, slots=True)
class Variables:
    """The flag is a variable in the environment of every worker, as Accelerate's own launch sets it."""

    names: tuple[str, ...]

    def of(self, value: Any) -> dict[str, str]:
        """The variables for a value; a list has one for each of its parts."""
        values = value if isinstance(value, tuple) else (value,)
        return dict(zip(self.names, map(str, values), strict=True))


@dataclass(frozen=True, slots=True)
class Says:
    """The flag gives settings of this package these values."""

    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OfTpus:
    """The flag says something of TPUs (a field of `Tpus`), which matters only where a launch is on them."""

    field: str
    # what a flag without a value says
    value: bool = True

    @property
    def why(self) -> str:
        """The reason for which it changes nothing elsewhere."""
        return "it is an option of a TPU, which --tpu asks for"


@dataclass(frozen=True, slots=True)
class Nothing:
    """The flag changes nothing here."""

    why: str


@dataclass(frozen=True, slots=True)
class PartOf:
    """The flag is an option of something that was not asked for: it changes nothing, here as there."""

    what: str
    asked_by: str

    @property
    def why(self) -> str:
        """The reason."""
        return f"it is an option of {self.what}, which {self.asked_by} asks for"


@dataclass(frozen=True, slots=True)
class Later:
    """What the flag asks for is not offered yet."""

    what: str


Becomes: TypeAlias = ASetting | OfLaunch | Says | OfTpus | Variables | Nothing | PartOf | Later


@dataclass(frozen=True, slots=True)
class ThreeAnswers:
    """Three times yes or no: `false,false,true`."""

    PLACEHOLDER: ClassVar[str] = "BOOL,BOOL,BOOL"

    @property
    def expected(self) -> str:
        return "three of true and false, such as 'false,false,true'"

    def check(self, value: Any) -> tuple[bool, ...]:
        """The answers, from their text."""
        return self.parse(str(value))

    def parse(self, text: str) -> tuple[bool, ...]:
        """The answers."""
        answers = tuple(YesNo().parse(part) for part in text.split(","))
        if len(answers) != 3:
            raise Unfit
        return answers


@dataclass(frozen=True, slots=True)
class Streams:
    """Which of a process's streams: a number that torchrun knows (0 none, 1 stdout, 2 stderr, 3 both), or one for each rank."""

    PLACEHOLDER: ClassVar[str] = "0-3"

    @property
    def expected(self) -> str:
        return "0 (none), 1 (stdout), 2 (stderr), 3 (both), or one for each rank, such as '0:3,1:1'"

    def check(self, value: Any) -> str:
        """The text, where it is one."""
        return self.parse(str(value))

    def parse(self, text: str) -> str:
        """The text, where it is one."""
        if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*,?", text):
            raise Unfit
        return text


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variable of the environment with its value."""

    PLACEHOLDER: ClassVar[str] = "NAME=VALUE"

    @property
    def expected(self) -> str:
        return "a name and a value, such as 'A=1'"

    def check(self, value: Any) -> str:
        """The text, where it is one."""
        return self.parse(str(value))

    def parse(self, text: str) -> str:
        """The text, where it is one."""
        if not re.match(r"[A-Za-z_]\w*=", text):
            raise Unfit
        return text


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of theirs: how it is written, which values it takes (`None`: none), and what becomes of it."""

    name: str
    becomes: Becomes
    kind: Kind | None = None
    repeats: bool = False
    # what the help says of it; the help leaves those out that have none
    help: str = ""

    @property
    def spellings(self) -> tuple[str, ...]:
        """With underscores, and with hyphens."""
        return tuple(dict.fromkeys([f"--{self.name}", f"--{self.name.replace('_', '-')}"]))


def _options(becomes: Becomes, **kinds: Kind | None) -> Iterator[Flag]:
    """Flags of which the same becomes."""
    return (Flag(name, becomes, kind) for name, kind in kinds.items())


def _fp8(**kinds: Kind | None) -> Iterator[Flag]:
    """Flags that are a variable of the same name."""
    return (Flag(name, Variables((f"ACCELERATE_{name.upper()}",)), kind) for name, kind in kinds.items())


_WHOLE, _NUMBER, _TEXT, _YES_NO = Whole(), Number(), Text(), YesNo()
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

# In the order of their help. Kinds of settings are the settings' own.
FLAGS: tuple[Flag, ...] = (
    *_options(OfLaunch(), config_file=_TEXT, quiet=None, module=None, no_python=None, tee=Streams()),
    *(Flag(name, ASetting(_RENAMED.get(name, name))) for name in (*_SETTINGS, "log_dir")),
    Flag("multi_gpu", Nothing("there is one process for each accelerator wherever --cpu does not say otherwise")),
    Flag("same_network", Nothing("processes of one machine meet on its loopback address")),
    Flag("role", Nothing("all processes have the one role that torchrun calls 'default'"), _TEXT),
    Flag("use_fsdp", Later("FSDP")),
    *_options(
        PartOf("FSDP", "--use_fsdp"),
        fsdp_version=OneOf(("1", "2")),
        fsdp_offload_params=_TEXT,
        fsdp_min_num_params=_WHOLE,
        fsdp_sharding_strategy=_TEXT,
        fsdp_reshard_after_forward=_TEXT,
        fsdp_auto_wrap_policy=_TEXT,
        fsdp_transformer_layer_cls_to_wrap=_TEXT,
        fsdp_backward_prefetch=_TEXT,
        fsdp_state_dict_type=_TEXT,
        fsdp_forward_prefetch=_TEXT,
        fsdp_use_orig_params=_TEXT,
        fsdp_cpu_ram_efficient_loading=_TEXT,
        fsdp_sync_module_states=_TEXT,
        fsdp_activation_checkpointing=_TEXT,
        fsdp_activation_checkpointing_offload=_TEXT,
    ),
    Flag("use_parallelism_config", Later("a parallelism configuration")),
    *_options(
        PartOf("a parallelism configuration", "--use_parallelism_config"),
        parallelism_config_dp_replicate_size=_WHOLE,
        parallelism_config_dp_shard_size=_WHOLE,
        parallelism_config_tp_size=_WHOLE,
        parallelism_config_cp_size=_WHOLE,
        parallelism_config_cp_backend=OneOf(("torch",)),
        parallelism_config_cp_comm_strategy=_TEXT,
        parallelism_config_sp_size=_WHOLE,
        parallelism_config_sp_backend=OneOf(("deepspeed",)),
        parallelism_config_sp_seq_length=_TEXT,
        parallelism_config_sp_seq_length_is_variable=_TEXT,
        parallelism_config_sp_attn_implementation=_TEXT,
    ),
    Flag("use_deepspeed", Later("DeepSpeed")),
    *_options(
        PartOf("DeepSpeed", "--use_deepspeed"),
        deepspeed_config_file=_TEXT,
        zero_stage=_WHOLE,
        offload_optimizer_device=_TEXT,
        offload_param_device=_TEXT,
        offload_optimizer_nvme_path=_TEXT,
        offload_param_nvme_path=_TEXT,
        gradient_clipping=_NUMBER,
        zero3_init_flag=_TEXT,
        zero3_save_16bit_model=_TEXT,
        deepspeed_hostfile=_TEXT,
        deepspeed_exclusion_filter=_TEXT,
        deepspeed_inclusion_filter=_TEXT,
        deepspeed_multinode_launcher=_TEXT,
        deepspeed_moe_layer_cls_names=_TEXT,
    ),
    Flag("use_megatron_lm", Later("Megatron-LM")),
    *_options(
        PartOf("Megatron-LM", "--use_megatron_lm"),
        megatron_lm_tp_degree=_WHOLE,
        megatron_lm_use_custom_fsdp=_TEXT,
        megatron_lm_no_load_optim=_TEXT,
        megatron_lm_eod_mask_loss=_TEXT,
        megatron_lm_overlap_cpu_optimizer_d2h_h2d=_TEXT,
        megatron_lm_no_save_optim=_TEXT,
        megatron_lm_optimizer_cpu_offload=_TEXT,
        megatron_lm_use_precision_aware_optimizer=_TEXT,
        megatron_lm_decoder_last_pipeline_num_layers=_WHOLE,
        megatron_lm_pp_degree=_WHOLE,
        megatron_lm_num_micro_batches=_WHOLE,
        megatron_lm_sequence_parallelism=_TEXT,
        megatron_lm_recompute_activations=_TEXT,
        megatron_lm_use_distributed_optimizer=_TEXT,
        megatron_lm_gradient_clipping=_NUMBER,
        megatron_lm_recompute_granularity=_TEXT,
        megatron_lm_recompute_method=_TEXT,
        megatron_lm_recompute_num_layers=_WHOLE,
        megatron_lm_attention_backend=_TEXT,
        megatron_lm_expert_model_parallel_size=_WHOLE,
        megatron_lm_context_parallel_size=_WHOLE,
        megatron_lm_attention_dropout=_NUMBER,
        megatron_lm_hidden_dropout=_NUMBER,
        megatron_lm_attention_softmax_in_fp32=_TEXT,
        megatron_lm_expert_tensor_parallel_size=_WHOLE,
        megatron_lm_calculate_per_token_loss=_TEXT,
        megatron_lm_use_rotary_position_embeddings=_TEXT,
    ),
    Flag(
        "tpu",
        Says({"engine": "xla", "cpu": False}),
        help="Compute on all cores of this machine's TPU, through torch_xla; as --engine xla.",
    ),
    Flag(
        "tpu_cluster",
        OfTpus("is_pod"),
        help="Print the line that runs this on every machine of a TPU pod, and start nothing here.",
    ),
    # the one that a launch on a pod's own machines is given, and holds there whatever else is said
    Flag("no_tpu_cluster", OfTpus("is_pod", value=False)),
    Flag("tpu_use_sudo", OfTpus("sudo"), help="Run it with sudo on the machines of a pod."),
    Flag("vm", Nothing("the machines of a TPU are reached by the TPU's own name"), _TEXT, repeats=True),
    Flag("env", OfTpus("environment"), Assignment(), repeats=True, help="A variable on the machines of a pod."),
    Flag(
        "main_training_function",
        OfTpus("function"),
        _TEXT,
        help="Import the script on each core and call this function of it, in place of running the script.",
    ),
    Flag("downcast_bf16", OfTpus("downcasts"), help="With bf16, let float64 become float32, not bfloat16."),
    Flag("mpirun_hostfile", Later("a launch by mpirun"), _TEXT),
    *_options(
        PartOf("SageMaker", "a configuration file with compute_environment: AMAZON_SAGEMAKER"),
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
    Flag(
        "fp8_override_linear_precision",
        Variables(("ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD")),
        ThreeAnswers(),
    ),
)
# Their choices are written in capitals, and so are the variables.
_IN_CAPITALS = {"fp8_format", "fp8_opt_level"}
# What can't be asked for together.
_ONE_OF = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp")


@dataclass(frozen=True, slots=True)
class Theirs:
    """What a command line says in flags of theirs that are no settings here."""

    values: Mapping[str, Any]

    def settings(self) -> dict[str, Any]:
        """What is said of settings of this package."""
        found: dict[str, Any] = {}
        for one, _ in self._said():
            if isinstance(one.becomes, Says):
                found.update(one.becomes.settings)
        return found

    def tpus(self) -> dict[str, Any]:
        """What is said of TPUs, by the fields of `Tpus`."""
        found: dict[str, Any] = {}
        for one, value in self._said():
            if isinstance(one.becomes, OfTpus):
                found[one.becomes.field] = one.becomes.value if one.kind is None else value
        return found

    def variables(self) -> dict[str, str]:
        """What workers find in their environment because of it."""
        found: dict[str, str] = {}
        for one, value in self._said():
            if isinstance(one.becomes, Variables):
                found.update(one.becomes.of(value))
        return found

    def without_effect(self, *, on_tpus: bool) -> dict[str, str]:
        """The flags that change nothing in a launch, which is on TPUs or not, and why."""
        idle = (Nothing, PartOf) if on_tpus else (Nothing, PartOf, OfTpus)
        return {f"--{one.name}": one.becomes.why for one, _ in self._said() if isinstance(one.becomes, idle)}

    def surprises(self, *, on_tpus: bool) -> list[str]:
        """Of those, what a person who wrote them would not expect."""
        expected = {f"--{one.name}" for one in FLAGS if isinstance(one.becomes, Nothing)}
        found = self.without_effect(on_tpus=on_tpus).items()
        return [f"{flag} changes nothing: {why}." for flag, why in found if flag not in expected]

    def _said(self) -> Iterator[tuple[Flag, Any]]:
        return ((one, self.values[one.name]) for one in FLAGS if one.name in self.values)


def add_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """
    Make those flags known that are no settings and none of launch's own; the help has those of TPUs alone.

    Gives the heading under which it has them.
    """
    shown = parser.add_argument_group("TPUs")
    for one in FLAGS:
        if not isinstance(one.becomes, (ASetting, OfLaunch)):
            _add(shown if one.help else parser, one)
    return shown


def _add(parser: argparse._ActionsContainer, one: Flag) -> None:
    # as the settings are shown, with hyphens
    spellings = one.spellings[::-1]
    common: dict[str, Any] = {"dest": _PREFIX + one.name, "default": argparse.SUPPRESS}
    if one.kind is None:
        common |= {"action": "store_const", "const": True}
    else:
        common |= {"action": "append" if one.repeats else "store", "metavar": one.kind.PLACEHOLDER}
    parser.add_argument(spellings[0], **common, help=one.help or argparse.SUPPRESS)
    if spellings[1:]:
        parser.add_argument(*spellings[1:], **common, help=argparse.SUPPRESS)


def said(arguments: argparse.Namespace, *, cpu: bool) -> Theirs:
    """
    What a command line says in these flags, checked; `cpu` is whether it asks for the CPU, too.

    `ConfigurationError` tells which value can't be one, and what can't be asked for together; `NotYetError` what is not
    offered.
    """
    texts = {name.removeprefix(_PREFIX): text for name, text in vars(arguments).items() if name.startswith(_PREFIX)}
    known = {one.name: one for one in FLAGS}
    _check_together([name for name in _ONE_OF if name in texts or (name == "cpu" and cpu)])
    for name in texts:
        if isinstance(later := known[name].becomes, Later):
            raise NotYetError(
                f"--{name} asks for {later.what}, which is not offered here yet. Leave it out: every process keeps the "
                "whole model, and gradients are averaged."
            )
    return Theirs({name: _value(known[name], text) for name, text in texts.items()})


def _value(one: Flag, text: Any) -> Any:
    """The value of a flag's text, or those of its texts."""
    return tuple(read(one, each) for each in text) if one.repeats else read(one, text)


def read(one: Flag, text: Any) -> Any:
    """The value that a flag's text stands for."""
    if one.kind is None:
        return True
    try:
        value = one.kind.parse(text)
    except Unfit:
        raise ConfigurationError(
            f"--{one.name} was given {text!r}, but should be {one.kind.expected}. Pass such a value, or leave it out."
        ) from None
    return value.upper() if one.name in _IN_CAPITALS else value


def check_streams(text: str) -> None:
    """Raise `ConfigurationError` where `--tee` names no streams."""
    (tee,) = (one for one in FLAGS if one.name == "tee")
    read(tee, text)


def _check_together(names: list[str]) -> None:
    if len(names) > 1:
        raise ConfigurationError(
            f"{' and '.join(f'--{name}' for name in names)} were asked for together, and each is another way to train. "
            "Ask for one of them."
        )
