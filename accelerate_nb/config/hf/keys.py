"""The keys of Accelerate's configuration files: those it knows, those it knew, those that stand together under one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """
    The content with each setting under a key of its own, whether it stood under a common one or not.

    >>> apart({"dynamo_config": {"dynamo_backend": "INDUCTOR", "mode": "default"}})
    {'dynamo_backend': 'INDUCTOR', 'dynamo_mode': 'default'}
    """
    found: dict[str, Any] = {}
    for name, value in content.items():
        if name in TOGETHER and isinstance(value, Mapping):
            prefix = name.removesuffix("config")
            found |= {item if item.startswith(prefix) else prefix + item: entry for item, entry in value.items()}
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
