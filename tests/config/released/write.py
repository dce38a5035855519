"""Writes one file for each way to train that the release of Accelerate on the path offers, into the folder that is named."""

import inspect
import re
import sys
from pathlib import Path

from accelerate.commands.config import cluster, config_args
from accelerate.utils import DistributedType, SageMakerDistributedType, write_basic_config

folder = Path(sys.argv[1])
source = inspect.getsource(cluster)
VALUES = {
    "dynamo_backend": "INDUCTOR",
    "dynamo_mode": "max-autotune",
    "dynamo_use_fullgraph": True,
    "dynamo_use_dynamic": False,
    "dynamo_use_regional_compilation": True,
    "zero_stage": 3,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero3_init_flag": True,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "nvme",
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_min_num_params": 100000000,
    "min_num_params": 100000000,
    "fsdp_use_orig_params": True,
    "fsdp_sync_module_states": True,
    "megatron_lm_tp_degree": 2,
    "megatron_lm_pp_degree": 2,
    "megatron_lm_num_micro_batches": 2,
    "megatron_lm_gradient_clipping": 1.0,
    "ipex": True,
    "mpirun_hostfile": "~/hostfile",
}


def nested(table):
    """A value for each key of a table that the questionnaire can ask for."""
    keys = set(re.findall(table + r"""\[\s*(?:prefix \+ )?["'](\w+)["']""", source))
    if table in ("dynamo_config", "megatron_lm_config", "parallelism_config"):
        prefix = table[:-6]
        keys = {prefix + key.replace(prefix, "") for key in keys} | {k for k in VALUES if k.startswith(prefix)}
    return {key: VALUES.get(key, "no" if "config_file" not in key else "zero3.json") for key in sorted(keys)}


def cluster_file(name, **options):
    fields = config_args.ClusterConfig.__dataclass_fields__
    wanted = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": "bf16",
        "use_cpu": False,
        "debug": False,
        "num_processes": 4,
        "machine_rank": 0,
        "num_machines": 1,
        "gpu_ids": "all",
        "main_training_function": "main",
        "main_process_port": 29511,
        "rdzv_backend": "static",
        "same_network": True,
        "downcast_bf16": "no",
        "dynamo_backend": "NO",
        **options,
    }
    settings = {key: value for key, value in wanted.items() if key in fields}
    config_args.ClusterConfig(**settings).to_yaml_file(str(folder / (name + ".yaml")))


OWN = {
    "NO": {"num_processes": 1, "dynamo_config": nested("dynamo_config"), "dynamo_backend": "INDUCTOR", "debug": True},
    "MULTI_CPU": {"use_cpu": True, "ipex_config": nested("ipex_config"), "mpirun_config": nested("mpirun_config")},
    "MULTI_GPU": {"gpu_ids": "0,2,3,5", "enable_cpu_affinity": True},
    "MPS": {"num_processes": 1, "use_mps_device": True},
    "FSDP": {"fsdp_config": nested("fsdp_config")},
    "DEEPSPEED": {"deepspeed_config": nested("deepspeed_config")},
    "MEGATRON_LM": {"megatron_lm_config": nested("megatron_lm_config")},
    "TPU": {
        "tpu_name": "mine",
        "tpu_zone": "us-central1-a",
        "tpu_use_cluster": True,
        "commands": ["ls"],
        "tpu_env": ["A=1"],
    },
    "TP": {"tp_config": {"tp_size": 4}},
}
OWN["XLA"] = OWN["TPU"]
types = [item.value for item in DistributedType if item.value != "MPS"] + ["MPS"] * hasattr(DistributedType, "MPS")
for name in types:
    cluster_file(name, distributed_type=name, **OWN.get(name, {}))
if "use_mps_device" in config_args.ClusterConfig.__dataclass_fields__:
    cluster_file("use_mps_device", distributed_type="NO", num_processes=1, use_mps_device=True)
if "parallelism_config" in config_args.ClusterConfig.__dataclass_fields__:
    degrees = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_tp_size": 2}
    cluster_file("parallelism", distributed_type="MULTI_GPU", parallelism_config=degrees)
fields = config_args.SageMakerConfig.__dataclass_fields__
sagemaker_settings = {
    "compute_environment": "AMAZON_SAGEMAKER",
    "distributed_type": SageMakerDistributedType.NO.value,
    "mixed_precision": "fp16",
    "use_cpu": False,
    "debug": False,
    "ec2_instance_type": "ml.p3.2xlarge",
    "iam_role_name": "role",
    "profile": "default",
    "region": "us-east-1",
    "num_machines": 1,
    "image_uri": None,
    "dynamo_backend": "NO",
}
config_args.SageMakerConfig(**{key: value for key, value in sagemaker_settings.items() if key in fields}).to_yaml_file(
    str(folder / "sagemaker.yaml")
)
write_basic_config("bf16", str(folder / "basic.yaml"))
