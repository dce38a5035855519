"""Writes these files again: each with the released version of Accelerate that its folder names."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
VERSIONS = [
    "0.11.0", "0.12.0", "0.13.2", "0.15.0", "0.17.1", "0.20.3", "0.21.0", "0.24.1", "0.27.2", "0.28.0", "0.30.1",
    "0.34.2", "1.0.1", "1.2.1", "1.6.0", "1.8.1", "1.10.1", "1.12.0", "1.13.0", "1.15.0",
]  # fmt: skip


def main() -> None:
    """Write all files, but for those that are as in the release before."""
    latest: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for version in VERSIONS:
            # some releases import pkg_resources, which newer setuptools have no more
            wheels = [f"accelerate=={version}", "setuptools==68.2.2"]
            path = str(Path(temporary, version))
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", path, *wheels]
            subprocess.run(pip, check=True)
            folder = FOLDER / version
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            command = [sys.executable, "-W", "ignore", str(FOLDER / "write.py"), str(folder)]
            environment = {**os.environ, "PYTHONPATH": path}
            subprocess.run(command, check=True, cwd=temporary, env=environment)
            for file in folder.glob("*.yaml"):
                written = file.read_bytes()
                if latest.get(file.name) == written:
                    file.unlink()
                latest[file.name] = written
            if not any(folder.iterdir()):
                folder.rmdir()


if __name__ == "__main__":
    main()
