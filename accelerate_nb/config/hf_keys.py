"""The keys of Accelerate's configuration files: those it knows and knew, those for TPUs, and what is not offered here."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from accelerate_nb.config.value_types import Boolean, InvalidValue, Text, ValueType, did_you_mean
from accelerate_nb.errors import ConfigurationError, NotYetError

# The keys that Accelerate's own tools know today; a file with others they refuse.
OF_ACCELERATE = frozenset({
    "command_file", "commands", "compute_environment", "debug", "deepspeed_config", "distributed_type", "downcast_bf16",
    "dynamo_config", "enable_cpu_affinity", "fp8_config", "fsdp_config", "gpu_ids", "machine_rank", "main_process_ip",
    "main_process_port", "main_training_function", "megatron_lm_config", "mixed_precision", "mpirun_config",
    "num_machines", "num_processes", "parallelism_config", "rdzv_backend", "same_network", "tpu_env", "tpu_name",
    "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone", "use_cpu",
})  # fmt: skip
# Those of a file for Amazon SageMaker, which has the common ones too.
OF_SAGEMAKER = frozenset({
    "additional_args", "base_job_name", "ec2_instance_type", "iam_role_name", "image_uri", "profile", "py_version",
    "pytorch_version", "region", "sagemaker_inputs_file", "sagemaker_metrics_file", "transformers_version",
})  # fmt: skip
# Those that earlier releases wrote, and that today's either translates or refuses.
OF_EARLIER = frozenset({"dynamo_backend", "fp16", "ipex_config", "tp_config", "use_mps_device"})
# Settings that stand together under one key.
TOGETHER = {
    "dynamo_config": (
        "dynamo_backend",
        "dynamo_mode",
        "dynamo_use_fullgraph",
        "dynamo_use_dynamic",
        "dynamo_use_regional_compilation",
    )
}


def together(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with those settings under their common key that have one."""
    common = {name: {item: content[item] for item in within if item in content} for name, within in TOGETHER.items()}
    elsewhere = {item for within in TOGETHER.values() for item in within}
    alone = {name: value for name, value in content.items() if name not in elsewhere}
    return alone | {name: value for name, value in common.items() if value}


def apart(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with each setting under a key of its own, whether it stood under a common one or not."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if name in TOGETHER and isinstance(value, Mapping):
            prefix = name.removesuffix("config")
            found |= {prefix + str(item).removeprefix(prefix): entry for item, entry in value.items()}
        else:
            found[name] = value
    return found


def today(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content as today's Accelerate spells it: keys of earlier releases are translated, or mean nothing now."""
    found = dict(content)
    if found.pop("fp16", False):
        found.setdefault("mixed_precision", "fp16")
    for name in OF_EARLIER - {"dynamo_backend"}:
        found.pop(name, None)
    if found.get("distributed_type") == "TPU":
        found["distributed_type"] = "XLA"
    return together(apart(found))


# -------------------------------------------------------------------------------------------------------------- TPUs

# Accelerate's words for a launch on TPUs: today's, and the one of releases before 0.28.
TPU_WORDS = frozenset({"XLA", "TPU"})
# The function that Accelerate's files name by default; here the program itself runs then.
_USUAL_FUNCTION = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class TpusConfig:
    """The settings of a launch on TPUs."""

    # `function`: what each core calls in an imported program, in place of running it. `downcasts`: bf16 means that
    # float64 becomes float32, not bfloat16 like the rest. A pod, machines of TPUs that train together, has a `name` and
    # a `zone`.

    function: str | None = None
    downcasts: bool = False
    is_pod: bool = False
    name: str | None = None
    zone: str | None = None
    sudo: bool = False
    environment: tuple[str, ...] = ()

    def keys(self) -> dict[str, Any]:
        """This under the keys of Accelerate's configuration files, as its own tools write it."""
        content = {_TPU_KEYS[field.name][0]: getattr(self, field.name) for field in fields(self)}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in content.items()}
        found = {key: value for key, value in plain.items() if value not in (None, [])}
        return {_TPU_KEYS["function"][0]: _USUAL_FUNCTION, **found}

    def variables(self, mixed_precision: str | None) -> dict[str, str]:
        """The environment variables that workers get because of it."""
        if not (self.downcasts and mixed_precision == "bf16"):
            return {}
        # torch_xla reads the second; Accelerate's own state, which a script may import, sets that by the first
        return {"ACCELERATE_DOWNCAST_BF16": "1", "XLA_DOWNCAST_BF16": "1"}


# The key of each field in a configuration file, and what it can hold.
_TPU_KEYS: dict[str, tuple[str, ValueType]] = {
    "function": ("main_training_function", Text()),
    "downcasts": ("downcast_bf16", Boolean()),
    "is_pod": ("tpu_use_cluster", Boolean()),
    "name": ("tpu_name", Text()),
    "zone": ("tpu_zone", Text()),
    "sudo": ("tpu_use_sudo", Boolean()),
    "environment": ("tpu_env", Text()),
}


def file_is_for_tpus(content: Mapping[str, Any]) -> bool:
    """Whether a configuration file is for TPUs."""
    return str(content.get("distributed_type")).upper() in TPU_WORDS


def tpus_of(content: Mapping[str, Any]) -> TpusConfig:
    """The TPU settings of a configuration file; `ConfigurationError` names an invalid value."""
    found: dict[str, Any] = {}
    for name, (key, value_type) in _TPU_KEYS.items():
        value = content.get(key)
        if value in (None, "") or (name == "function" and value == _USUAL_FUNCTION):
            continue
        if name == "environment":
            # its own questionnaire writes [''] for an empty reply
            found[name] = tuple(str(item) for item in (value if isinstance(value, list) else [value]) if str(item))
            continue
        try:
            found[name] = value_type.from_file(value)
        except InvalidValue:
            raise ConfigurationError(
                f"{key} in the configuration file is {value!r}, but should be {value_type.expected}. Correct it, or remove the line."
            ) from None
    return TpusConfig(**found)


def with_engine(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file for TPUs, in settings: through torch_xla, on all cores."""
    # Accelerate starts a process for every core whatever `num_processes` is there; a file with this package's own
    # `engine` means it
    if "engine" in content or not file_is_for_tpus(content):
        return dict(content)
    return {**{name: value for name, value in content.items() if name != "num_processes"}, "engine": "xla"}


# ------------------------------------------------------------------------------------------- what is not offered here

# Accelerate's words for the ways to train that are offered here.
_OFFERED = frozenset(
    {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MPS", "FSDP", "DEEPSPEED", "MEGATRON_LM", *TPU_WORDS}
)
# Those for the ways that would silently be left out, with what people call them.
_UNSUPPORTED = {
    "MULTI_HPU": "Gaudi accelerators",
    "MULTI_MLU": "MLUs",
    "MULTI_MUSA": "MUSA's GPUs",
    "MULTI_NEURON": "Neuron accelerators",
    "MULTI_NPU": "NPUs",
    "MULTI_SDAA": "SDAA's accelerators",
    "TP": "tensor parallelism",
}


def first_unsupported(content: Mapping[str, Any]) -> str | None:
    """The first feature of this file's content that is not supported yet, in words; `None` where there is none."""
    if (environment := content.get("compute_environment") or "LOCAL_MACHINE") != "LOCAL_MACHINE":
        return f"a machine other than this one (compute_environment: {environment})"
    distributed_type = _distributed_type(content)
    if distributed_type in _UNSUPPORTED:
        return f"{_UNSUPPORTED[distributed_type]} (distributed_type: {distributed_type})"
    package = str(fp8_entries(content).get("fp8_backend", "AO")).upper()
    if content.get("mixed_precision") == "fp8" and package != "AO":
        return f"fp8 by {package} (fp8_config: backend)"
    if split := _split(content.get("parallelism_config"), distributed_type):
        return f"a mesh that no strategy has ({', '.join(split)})"
    return None


def fp8_entries(content: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a file's `fp8_config`, under the names of Accelerate's flags; a backend that leaves the choice open is none."""
    found = content.get("fp8_config")
    named = found if isinstance(found, Mapping) else {}
    entries = {f"fp8_{str(name).removeprefix('fp8_')}": value for name, value in named.items()}
    if str(entries.get("fp8_backend") or "AUTO").upper() in {"AUTO", "NO"}:
        entries.pop("fp8_backend", None)
    return entries


def refuse_unsupported(content: Mapping[str, Any], where: str = "The configuration file") -> None:
    """Raise `NotYetError` for what is not supported yet, and `ConfigurationError` for an unknown `distributed_type`."""
    # a launch does this; a file that requests it is read and kept all the same
    distributed_type = _distributed_type(content)
    if (what := first_unsupported(content)) is not None:
        raise NotYetError(
            f"{where} requests {what}, which is not offered here yet. Pass config_file='' to launch without the file."
        )
    known = {*_OFFERED, *_UNSUPPORTED}
    if distributed_type not in known:
        suggestion = did_you_mean(distributed_type, known, f"Write one of {', '.join(sorted(_OFFERED))}.")
        raise ConfigurationError(f"{where} has distributed_type: {distributed_type}, which is unknown. {suggestion}")


def _distributed_type(content: Mapping[str, Any]) -> str:
    # YAML reads a bare `NO` as False
    return str(content.get("distributed_type") or "NO").upper()


def _split(degrees: Any, distributed_type: str) -> list[str]:
    """The degrees that no strategy has together."""
    # copies of what is split and not sharded, and sequences split by `sp_size` without DeepSpeed, or by `cp_size` with
    # it
    if not isinstance(degrees, Mapping):
        return []
    used = {str(name): value for name, value in degrees.items() if type(value) is int and value > 1}
    axes = {name.removeprefix("parallelism_config_").removesuffix("_size") for name in used}
    if "dp_replicate" in axes and axes & {"tp", "cp"} and "dp_shard" not in axes:
        return [f"{name}: {value}" for name, value in used.items()]
    refused = "cp_size" if distributed_type == "DEEPSPEED" else "sp_size"
    return [f"{name}: {value}" for name, value in used.items() if name.endswith(refused)]
