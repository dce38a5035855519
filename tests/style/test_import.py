"""What `import accelerate_nb` costs: none of the heavy packages."""

import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "numpy",
    "IPython",
    "ipywidgets",
    "anywidget",
    "nbformat",
    "yaml",
    "psutil",
    "cloudpickle",
    "safetensors",
}


def loaded_by(code: str) -> set[str]:
    """The top-level packages that a fresh Python has loaded after `code`."""
    report = f"import sys; {code}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code", ["import accelerate_nb", "import accelerate_nb.errors", "import accelerate_nb.events.event_types"]
)
def test_importing_the_package_brings_in_nothing_heavy(code: str) -> None:
    assert loaded_by(code) & HEAVY == set()


def test_importing_the_package_reads_no_events_and_messages() -> None:
    assert "msgspec" not in loaded_by("import accelerate_nb")


def test_the_check_would_see_torch() -> None:
    assert "torch" in loaded_by("from accelerate_nb import Accelerator")


def test_naming_the_launcher_brings_in_no_torch() -> None:
    assert "torch" not in loaded_by("from accelerate_nb import notebook_launcher")
