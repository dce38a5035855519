"""Warnings of a script name the notebook's cells and lines, and go where they always went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.export.making import exported

WARNS = "def careful():\n    x = 1\n    warnings.warn('take care')\n\ncareful()"


def stderr_of(folder: Path, *cells: str, flags: tuple[str, ...] = ()) -> str:
    """What a script writes to its standard error under plain Python."""
    path = exported(folder, "import warnings\nwarnings.simplefilter('always')", *cells)
    done = subprocess.run([sys.executable, *flags, path.name], cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr


def test_a_warning_names_notebook_cell_and_line(tmp_path: Path) -> None:
    cells = [
        WARNS,
        "import asyncio, os\nos.chdir('/')\nawait asyncio.sleep(0)\n\nwarnings.warn('old', DeprecationWarning)\nx = 1",
        "from accelerate_nb.user_warnings import warn_user\nwarn_user('of this package')\nx = 2",
    ]
    assert stderr_of(tmp_path, *cells).splitlines() == [
        "train.ipynb, cell 2, line 3: UserWarning: take care",
        "  warnings.warn('take care')",
        "train.ipynb, cell 3, line 5: DeprecationWarning: old",
        "  warnings.warn('old', DeprecationWarning)",
        "train.ipynb, cell 4, line 2: UserWarning: of this package",
        "  warn_user('of this package')",
    ]


def test_warnings_of_other_files_look_as_ever(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("import warnings\nwarnings.warn('elsewhere')\n")
    assert (
        stderr_of(tmp_path, "import other")
        == f"{tmp_path / 'other.py'}:2: UserWarning: elsewhere\n  warnings.warn('elsewhere')\n"
    )


PRINTS = "    print('seen', message, os.path.basename(filename), file=sys.stderr)"
GIVES = "    return f'seen {message} {os.path.basename(filename)}\\n'"
CALLS = "    return 'seen ' + before(*args, **kwargs)"
WARNED = "train.ipynb, cell 3, line 3: UserWarning: take care\n  warnings.warn('take care')\n"


@pytest.mark.parametrize(
    ("hook", "output"),
    [
        (
            f"def show(message, category, filename, *_):\n{PRINTS}\nwarnings.showwarning = show",
            "seen take care train.py\n",
        ),
        (
            f"def form(message, category, filename, *_):\n{GIVES}\nwarnings.formatwarning = form",
            "seen take care train.py\n",
        ),
        (
            f"before = warnings.formatwarning\ndef form(*args, **kwargs):\n{CALLS}\nwarnings.formatwarning = form",
            f"seen {WARNED}",
        ),
        (
            "import logging\nlogging.basicConfig(format='%(name)s %(message)s')\nlogging.captureWarnings(True)",
            f"py.warnings {WARNED}\n",
        ),
        ("warnings.simplefilter('ignore')", ""),
    ],
    ids=["showwarning", "formatwarning", "formatwarning that calls the one before", "logging", "a filter"],
)
def test_hooks_and_filters_of_the_person_s_own_go_on(hook: str, output: str, tmp_path: Path) -> None:
    assert stderr_of(tmp_path, f"import os, sys\n{hook}", WARNS) == output


def test_a_warning_that_is_made_an_error_ends_the_script_at_its_line(tmp_path: Path) -> None:
    output = stderr_of(tmp_path, "warnings.resetwarnings()\nwarnings.simplefilter('error')", WARNS)
    assert "  train.ipynb, cell 3, line 3, in careful\n" in output
    assert output.endswith("UserWarning: take care\n")
    assert "train.py" not in output


def test_what_collects_warnings_collects_them(tmp_path: Path) -> None:
    cell = f"import pytest, sys\n{WARNS[:-10]}with pytest.warns(UserWarning, match='care') as found:\n    careful()\n"
    assert stderr_of(tmp_path, f"{cell}print(len(found), found[0].lineno > 10, file=sys.stderr)") == "1 True\n"


def test_where_a_file_was_opened_that_nobody_closed_is_reported_in_the_same_words(tmp_path: Path) -> None:
    cell = "def left_open():\n    open(os.devnull)\n\nimport os\nleft_open()\nx = 1"
    output = stderr_of(tmp_path, cell, flags=("-X", "tracemalloc=5"))
    assert output.startswith("train.ipynb, cell 2, line 2: ResourceWarning: unclosed file")
    assert output.endswith(
        "Object allocated at (most recent call last):\n"
        "  train.ipynb, cell 2, line 5\n    left_open()\n  train.ipynb, cell 2, line 2\n    open(os.devnull)\n"
    )


def test_a_second_script_in_the_same_process_names_its_own_lines(tmp_path: Path) -> None:
    second = exported(tmp_path, "import warnings", "\nwarnings.warn('second')", name="second.ipynb")
    output = stderr_of(tmp_path, f"import runpy\nrunpy.run_path({os.fspath(second)!r}, run_name='__main__')", WARNS)
    assert output.splitlines()[::2] == [
        "second.ipynb, cell 2, line 2: UserWarning: second",
        "train.ipynb, cell 3, line 3: UserWarning: take care",
    ]
