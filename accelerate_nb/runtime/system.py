"""What this machine's operating system is."""

from __future__ import annotations

import logging
import platform
import re

from packaging.version import Version

_HANGS_BELOW = "5.5.0"

_log = logging.getLogger(__name__)


def check_os_kernel() -> None:
    """Warn, on Linux, of a kernel older than 5.5, on which training may hang."""
    found = re.search(r"\d+\.\d+\.\d+", platform.release())
    if platform.system() != "Linux" or found is None or Version(found[0]) >= Version(_HANGS_BELOW):
        return
    _log.warning(
        f"Linux {found[0]} runs here, and below {_HANGS_BELOW} a process can hang. Upgrade the kernel to that version or a "
        "newer one."
    )
