"""The fixed words that Accelerate's constants hold, where they are not the names of a checkpoint's files."""

import operator
from collections.abc import Callable
from typing import Any

from torch import nn

# What `accelerate.utils.constants` offers.
__all__ = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION", "BETA_SP_AVAILABLE_DEEPSPEED_VERSION", "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION", "CUDA_DISTRIBUTED_TYPES", "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DTENSOR_PYTORCH_VERSION", "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION", "FSDP2_PYTORCH_VERSION",
    "FSDP2_STATE_DICT_TYPE", "FSDP_AUTO_WRAP_POLICY", "FSDP_BACKWARD_PREFETCH", "FSDP_MODEL_NAME",
    "FSDP_PYTORCH_VERSION", "FSDP_SHARDING_STRATEGY", "FSDP_STATE_DICT_TYPE",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "PROFILE_PATTERN_NAME", "STR_OPERATION_TO_FUNC",
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "TORCH_DISTRIBUTED_OPERATION_TYPES", "TORCH_DYNAMO_MODES",
    "TORCH_LAUNCH_PARAMS", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
]  # fmt: skip

STR_OPERATION_TO_FUNC: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}

# From which version on torch, or another package, can do something; all of them are older than what this package needs.
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"
FSDP2_PYTORCH_VERSION = "2.6.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"

FSDP_MODEL_NAME = "pytorch_model_fsdp"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
DEEPSPEED_MULTINODE_LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]
TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]

# The names of `torch.distributed.run`'s settings.
TORCH_LAUNCH_PARAMS = [
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("max_restarts", "monitor_interval", "start_method", "role", "module", "m", "no_python", "run_path"),
    *("log_dir", "r", "redirects", "t", "tee", "node_rank", "master_addr", "master_port"),
]

# The names of `DistributedType` whose processes are connected by `torch.distributed`.
CUDA_DISTRIBUTED_TYPES = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
TORCH_DISTRIBUTED_OPERATION_TYPES = [
    *CUDA_DISTRIBUTED_TYPES,
    *(f"MULTI_{device}" for device in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "CPU", "HPU", "NEURON")),
]

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)
