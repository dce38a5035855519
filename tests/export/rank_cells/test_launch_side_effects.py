"""What a launched function changes is told of where the notebook reads it again, and of nothing else."""

from __future__ import annotations

import pytest

from tests.export.making import script

TRAIN = (
    "model, seen = Net(), []\ndef step():\n    model.train()\ndef train(times=1):\n    step()\n    seen.append(times)"
)
LAUNCH = "notebook_launcher(train, num_processes=2)"


@pytest.mark.parametrize(
    ("cells", "where", "names"),
    [
        ([TRAIN, LAUNCH, "print(seen)"], (2, 1), "`seen`, read again in cell 3"),
        ([TRAIN, f"x = {LAUNCH}\nx", LAUNCH], (2, 1), "`model`, `seen`, read again in cell 3"),
        ([TRAIN, f"for _ in range(2):\n    {LAUNCH}"], (2, 2), "`model`, `seen`, read again in cell 2"),
        (
            ["def f(m):\n    m.step()", "m = Net()\nnotebook_launcher(f, (m,))", "m"],
            (2, 2),
            "`m`, read again in cell 3",
        ),
        (["n = 0\ndef f():\n    global n\n    n += 1\nnotebook_launcher(f)\nn"], (1, 5), "`n`, read again in cell 1"),
        (["c = {}\ndef f():\n    c['a'] = 1\nnotebook_launcher(f)\nc"], (1, 4), "`c`, read again in cell 1"),
    ],
)
def test_a_change_that_is_read_again_is_reported_at_the_launch(tmp_path, cells, where, names):
    (note,) = script(tmp_path, *cells).notes
    cell, line = where
    assert note.startswith(f"train.ipynb, cell {cell}, line {line}: ")
    assert f"changes {names}. " in note


@pytest.mark.parametrize(
    "cells",
    [
        [TRAIN, LAUNCH, "print('done')"],
        [TRAIN, LAUNCH, "model, seen = Net(), []", "seen"],
        ["seen = [1]\ndef train():\n    return len(seen)", LAUNCH, "print(seen)"],
        ["def train():\n    seen = []\n    seen.append(1)\n    return seen", f"seen = {LAUNCH}", "seen"],
        ["from elsewhere import train", LAUNCH, "train"],
    ],
)
def test_what_is_not_changed_or_not_read_is_no_matter(tmp_path, cells):
    assert script(tmp_path, *cells).notes == ()
