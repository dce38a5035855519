"""Installs what an extra of pyproject.toml names, without the package and what the package itself needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10: pip brings its own copy
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main(extra: str) -> None:
    """Install the requirements of `extra` into the Python that runs this."""
    requirements = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"][extra]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *requirements]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
