"""The random states of one process, as a checkpoint keeps them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from accelerate_nb.devices import xla


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, under the names that Accelerate gives them."""
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    if torch.xpu.is_available():
        states["torch_xpu_manual_seed"] = torch.xpu.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["torch_mps_manual_seed"] = torch.mps.get_rng_state()
    if (state := xla.random_state()) is not None:
        states["xm_seed"] = state
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore every generator that `random_states` kept and that this process has."""
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    if "torch_cuda_manual_seed" in states and torch.cuda.is_available():
        _restore_devices(torch.cuda, states["torch_cuda_manual_seed"])
    if "torch_xpu_manual_seed" in states and torch.xpu.is_available():
        _restore_devices(torch.xpu, states["torch_xpu_manual_seed"])
    if "torch_mps_manual_seed" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["torch_mps_manual_seed"])
    xla.set_random_state(states.get("xm_seed"))


def _restore_devices(module: Any, states: list[torch.Tensor]) -> None:
    # a checkpoint from a machine with more devices than this one has states that this one does not need
    for index, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(state, index)
