"""A configuration file for this machine as it is."""

import logging
import os
from pathlib import Path
from typing import Literal

from accelerate_nb.config.hf_files import write_basic
from accelerate_nb.devices.probe import probe
from accelerate_nb.runtime.compat.dataclasses import DistributedType

_log = logging.getLogger("accelerate_nb.commands.config.default")


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """
    Write Accelerate's configuration file for all accelerators of this machine, or for its CPU; the file's path.

    `False` where there is a file already, which stays as it is. `save_location` is by default where Accelerate's tools,
    and this package's launchers, read it. A notebook needs no such file.
    """
    found = probe()
    number = max(1, found.count)
    path = write_basic(
        mixed_precision,
        save_location,
        distributed_type=DistributedType.of(number, found.kind).value,
        num_processes=number,
        cpu=found.count == 0,
    )
    if path is None:
        _log.warning("There is a configuration file already, and it stays: name another path, or remove it.")
        return False
    return path
