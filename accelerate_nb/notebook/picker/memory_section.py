"""The picker's memory estimate: a model's name, what each rank will hold of it, and a button that takes the smallest mesh that fits."""

from __future__ import annotations

import contextvars
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import ipywidgets

from accelerate_nb.notebook.picker import html

# A model of code may take long to import what it needs.
_LIMIT = 120.0


@dataclass(frozen=True, slots=True)
class PlannedMesh:
    """The mesh of the form's launch, by axes, and the precision as estimates call it."""

    degrees: Mapping[str, int]
    precision: str

    @property
    def text(self) -> str:
        """The mesh as the command line takes it."""
        return ",".join(f"{axis}={degree}" for axis, degree in self.degrees.items()) or "dp_replicate=1"


class MemorySection:
    """The part of the form that estimates memory, in a process of its own, so that the notebook's loads no torch."""

    def __init__(self, planned: Callable[[], PlannedMesh | None], use: Callable[[Mapping[str, int]], None]) -> None:
        self._planned, self._use = planned, use
        self._thread: threading.Thread | None = None
        self._smallest: Mapping[str, int] | None = None
        placeholder = "a folder, a file, or file.py:Model"
        self.model = ipywidgets.Text(description="model", placeholder=placeholder, continuous_update=False)
        self.begin = ipywidgets.Button(description="Estimate", tooltip="What each rank will hold of this model")
        self.take = ipywidgets.Button(description="Use the smallest mesh", disabled=True)
        self._result = ipywidgets.HTML()
        self.begin.on_click(lambda _: self.start())
        self.take.on_click(lambda _: self._take())
        heading = ipywidgets.HTML(html.heading("Does it fit?", "Memory of weights, gradients and AdamW on each rank."))
        path = ipywidgets.Box([self.model]).add_class("acc-path")
        row = ipywidgets.Box([path, self.begin, self.take]).add_class("acc-row")
        self.box = ipywidgets.VBox([heading, row, self._result]).add_class("acc-group")

    def start(self) -> None:
        """Begin an estimate in the background, unless one runs."""
        planned, model = self._planned(), self.model.value.strip()
        if self._thread is not None or planned is None or not model:
            if not model:
                self._result.value = html.status("Name a model first.")
            return
        self._result.value = html.status("Estimating…")
        self.begin.disabled = self.take.disabled = True
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work, model, planned), name="accelerate_nb memory estimate", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the estimate is there, and give what is shown."""
        if (thread := self._thread) is not None:
            thread.join(timeout)
        return str(self._result.value)

    def _work(self, model: str, planned: PlannedMesh) -> None:
        try:
            found = _estimated(model, planned)
            self._smallest = (found.get("smallest_mesh") or {}).get("degrees")
            self._result.value = html.memory(found, planned.precision)
            self.take.disabled = self._smallest is None or self._smallest == planned.degrees
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._result.value = html.remark(str(error), grave=True)
        finally:
            self._thread = None
            self.begin.disabled = False

    def _take(self) -> None:
        if self._smallest is not None:
            self._use(self._smallest)
            self.take.disabled = True


def _estimated(model: str, planned: PlannedMesh) -> dict[str, Any]:
    """The figures of the command line; `ValueError` with its message where it can't estimate."""
    words = [sys.executable, "-m", "accelerate_nb.cli.main", "estimate-memory", model, "--json", "--mesh", planned.text]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("accelerate-nb: ") or f"It ended with {done.returncode}.")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def settings_of(degrees: Mapping[str, int]) -> dict[str, Any]:
    """
    The settings of a launch on a mesh.

    >>> settings_of({"dp_shard": 2})
    {'num_processes': 2, 'parallelism_config': {'parallelism_config_dp_shard_size': 2}}
    """
    sizes = {f"parallelism_config_{axis}_size": degree for axis, degree in degrees.items()}
    return {"num_processes": prod(degrees.values()), "parallelism_config": sizes or None}
