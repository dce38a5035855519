"""Where this process talks to a person: a Jupyter kernel, IPython in a terminal, or a plain script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accelerate_nb.notebook.screens import Cell, Pipe, Screen, Terminal


@dataclass(frozen=True, slots=True)
class Host:
    """What is known of the place; `service` names a hosted notebook service."""

    kind: Literal["jupyter", "ipython", "script"]
    service: Literal["colab", "kaggle"] | None
    screen: Callable[[], Screen]


def host(environment: Mapping[str, str]) -> Host:
    """Where we are, found without importing anything."""
    shell = _shell()
    service = _service(shell, environment)
    if getattr(shell, "kernel", None) is not None:
        return Host("jupyter", service, Cell)
    screen = Terminal if _is_terminal(sys.stdout) else Pipe
    return Host("script" if shell is None else "ipython", service, screen)


def _shell() -> Any:
    """IPython's shell where this process has one; a process that never imported IPython has none."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _service(shell: Any, environment: Mapping[str, str]) -> Literal["colab", "kaggle"] | None:
    if type(shell).__module__.startswith("google.colab"):
        return "colab"
    # KAGGLE_USERNAME and KAGGLE_KEY are credentials, which people set everywhere
    return "kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in environment else None


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that can move its cursor; a stream may be `None`, or closed."""
    try:
        return bool(stream.isatty()) and sys.platform != "win32"
    except (AttributeError, ValueError):
        return False
