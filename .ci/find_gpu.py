"""Whether there is an NVIDIA GPU on which `make test-gpu` and `make bench-gpu` can run: exit code 0, or 69 and the reason."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# any Python has the package's own way to count GPUs, which needs no other package, and no installed one
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate_nb.devices.gpus import nvidia_gpus

count = nvidia_gpus(os.environ)
if not count:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    said = "" if hidden is None else f" that CUDA_VISIBLE_DEVICES={hidden!r} shows"
    print(f"== this machine has no NVIDIA GPU{said}, so what needs one is left out")
    sys.exit(69)
print(f"== {count} NVIDIA GPU{'s' if count > 1 else ''}")
