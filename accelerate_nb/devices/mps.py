"""Apple's GPU, which every Mac with Apple's own processor has."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping


class Mps:
    """The one GPU of such a Mac."""

    name = "mps"
    label = "Apple GPU"
    build = ""
    variable = ""

    def count(self, environment: Mapping[str, str]) -> int:
        return int(sys.platform == "darwin" and platform.machine() == "arm64")
