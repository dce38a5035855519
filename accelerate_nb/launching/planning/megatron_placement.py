"""Training with Megatron as it is requested of a launch: what can be known to fail before any worker starts."""

from __future__ import annotations

from importlib.util import find_spec

from accelerate_nb.config.options import megatron
from accelerate_nb.config.training import TrainingConfig
from accelerate_nb.errors import LaunchError, MissingExtraError, NotYetError


def check(config: TrainingConfig, kind: str, size: int) -> None:
    """
    Raise `LaunchError` for what Megatron can't do on so many processes, or `MissingExtraError` where it is not installed.

    `kind` is of the devices. `NotYetError` names options that would change nothing.
    """
    if find_spec("megatron") is None:
        raise MissingExtraError(
            "strategy='megatron' was requested, and megatron-core is not installed: pip install 'accelerate-nb[megatron]'"
        )
    if kind != "cuda":
        raise LaunchError(
            f"strategy='megatron' was requested on {kind} devices, but megatron-core computes on the current CUDA device. Launch it on "
            "NVIDIA GPUs, or pass parallelism_config with tp_size or pp_size in its place."
        )
    options = config.megatron_lm_config or {}
    if said := megatron.not_offered(options):
        raise NotYetError(f"megatron_lm_config has {', '.join(said)}, which is not offered here yet. Leave it out.")
    if options.get("megatron_lm_sequence_parallelism") and options.get("megatron_lm_tp_degree", 1) == 1:
        raise LaunchError(
            "megatron_lm_sequence_parallelism was requested with megatron_lm_tp_degree: 1, but sequences are cut among the processes "
            "that split a layer. Pass a degree of 2 or more, or leave it out."
        )
    if size % (number := megatron.processes(options)):
        raise LaunchError(
            f"megatron_lm_config was requested with degrees whose product is {number}, which does not divide {size} processes. Pass "
            f"num_processes={number} or a multiple, or other degrees."
        )
