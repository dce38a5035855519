"""How a build of torch for the CPU is installed: pip says first which one it would take, and one for NVIDIA's GPUs is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from urllib.error import URLError
from urllib.request import urlopen

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off", "--no-deps"]


def main(requirement: str, index: str = "") -> None:
    """
    Install `requirement` into the Python that runs this, looking at `index` beside pip's own.

    What it needs comes later, with the package: pip would ask `index` for each of those too.
    """
    asked = [requirement, *(["--extra-index-url", index] if index and answers(index) else [])]
    needs = requirements(asked)
    if sys.platform == "linux" and any(need.startswith(("nvidia-", "cuda-")) for need in needs):
        sys.exit(
            f"A build for the CPU was asked for as {requirement}, and pip found only one for NVIDIA's GPUs. "
            f"Make an index of CPU builds reachable (TORCH_INDEX={index}), or take the GPU build: make TORCH="
        )
    subprocess.run([*PIP, *asked], check=True)  # not quiet: it says which file it took


def answers(index: str) -> bool:
    """Whether `index` can be reached; pip itself would try for minutes."""
    try:
        with urlopen(index, timeout=10):
            return True
    except (URLError, TimeoutError) as error:
        print(f"{index} can't be reached ({error}); looking only where pip is set up to look", flush=True)
        return False


def requirements(asked: list[str]) -> list[str]:
    """What the build that pip would take says it needs; only its metadata are fetched."""
    found = subprocess.run([*PIP, "--quiet", "--dry-run", "--report", "-", *asked], stdout=subprocess.PIPE, check=True)
    installs = json.loads(found.stdout)["install"]  # empty where it is installed already
    return [need for item in installs for need in item["metadata"].get("requires_dist", [])]


if __name__ == "__main__":
    main(*sys.argv[1:])
