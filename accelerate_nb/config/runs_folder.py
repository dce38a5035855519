"""The folder of all runs' folders, as the settings of this process have it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from accelerate_nb.config.environment import runs_folder
from accelerate_nb.config.hf import files
from accelerate_nb.config.run_config import origin, setting_named


def configured_runs_folder(environment: Mapping[str, str], requested: str | os.PathLike[str] | None = None) -> Path:
    """The requested folder, else that in which a launch with this environment and its configuration file keeps its runs."""
    if requested is not None:
        return runs_folder(environment, os.fspath(requested))
    path = files.find(environment)
    content = None if path is None else files.read(path)
    return runs_folder(environment, origin(setting_named("folder"), {}, environment, content).value)
