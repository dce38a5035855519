"""What `import accelerate_nb` costs: none of the heavy packages."""

import pytest

from tests.processes import python

HEAVY = {
    *("torch", "numpy", "IPython", "ipywidgets", "anywidget"),
    *("nbformat", "yaml", "psutil", "cloudpickle", "safetensors"),
}


def loaded_by(code: str) -> set[str]:
    """The top-level packages that a fresh Python has loaded after `code`."""
    report = f"import sys; {code}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(python("-c", report, check=True).stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        # neither events nor messages are read
        ("import accelerate_nb", {*HEAVY, "msgspec"}),
        ("import accelerate_nb.errors", HEAVY),
        ("import accelerate_nb.events.event_types", HEAVY),
        ("from accelerate_nb import notebook_launcher", {"torch"}),
    ],
)
def test_an_import_brings_in_nothing_heavy(code: str, absent: set[str]) -> None:
    assert loaded_by(code) & absent == set()
