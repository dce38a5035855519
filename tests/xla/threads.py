"""Ranks that torch_xla itself has made threads of one process, as `torch_xla.launch` does on a TPU v2 or v3."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

LIMIT = 100.0


def on_threads(function: Callable[[], Any], folder: Path, devices: int = 2) -> list[Any]:
    """
    What a function of a test module returns on each of several ranks, in their order.

    They are made as torch_xla makes them in each process of its own launch, which itself brings no results back.
    """
    environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "GLOO_SOCKET_IFNAME": "lo"}
    found = folder / f"{function.__name__}.pickle"
    command = [sys.executable, "-m", __name__, function.__module__, function.__name__, str(found)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT + 20, cwd=root, check=False
    )
    assert found.exists(), f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    results: list[Any] = pickle.loads(found.read_bytes())
    return results


def main(module: str, name: str, found: str) -> NoReturn:
    """Run the function in a thread for each device, and leave what it returned."""
    import torch_xla._internal.pjrt as pjrt

    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    function = getattr(importlib.import_module(module), name)
    results = pjrt._run_thread_per_device(0, 1, function, pjrt.initialize_multiprocess)
    Path(found).write_bytes(pickle.dumps([results[rank] for rank in sorted(results)]))
    # the runtime's own threads need not be waited for
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
