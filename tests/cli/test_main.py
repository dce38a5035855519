"""What goes wrong in any command is said in one place."""

import subprocess
import sys

import pytest

# What Python raises is the same as where torch is not installed.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from accelerate_nb.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize("words", [["estimate-memory", "model.py:Net"], ["merge-weights", "shards", "merged"]])
def test_what_needs_torch_is_an_error_where_it_is_not_installed(words):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("accelerate-nb: This needs torch, which is not installed for ")
    assert done.stderr.count("\n") == 1
