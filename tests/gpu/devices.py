"""What tests do with a device: keep it busy, and see whether the host waits for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# More than any GPU does in a second, so that a kernel of so many cycles takes at least the time that was asked for.
_CYCLES_A_SECOND = 3e9


def compute_for(seconds: float, device: str | torch.device) -> None:
    """Give the device a kernel that takes at least so many seconds: the host goes on at once. On the CPU the host sleeps."""
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))
    else:
        time.sleep(seconds)


def finish(device: str | torch.device) -> None:
    """Wait until the device has computed everything."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def synchronizing_is_an_error(device: str | torch.device) -> Iterator[None]:
    """A block in which torch raises where the host would wait for the GPU; on the CPU there is nothing to wait for."""
    if torch.device(device).type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def is_pretended() -> bool:
    """Whether the GPUs are those of `make test-pretended-gpu`, which compute on the CPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_name(0) == "pretended GPU"
