"""A worker that fails is told in the cell: which rank, why, and where in the notebook."""

import re

import pytest

from tests.kernel.kernels import Kernel


def test_the_error_shows_the_lines_of_the_cell(kernel: Kernel) -> None:
    helper = kernel.ok("""
    def look_up(table, key):
        # a comment, so that the line is not the first
        return table[key]
    """)
    cell = kernel.run("""
    import os, time
    def fails():
        if os.environ["RANK"] == "1":
            look_up({}, "lost")
        time.sleep(60)
    notebook_launcher(fails, num_processes=2)
    """)
    text = cell.failure.text
    assert len(cell.failure.traceback.splitlines()) < 40, cell.failure.traceback
    assert cell.failure.name == "KeyError"
    # for a debugger
    assert kernel.value("__import__('sys').last_type.__name__") == "KeyError"
    assert text.startswith("rank 1 stopped with KeyError: 'lost'")
    assert f'Cell In[{cell.number}], line 4, in fails\n    look_up({{}}, "lost")' in text
    assert f"Cell In[{helper.number}], line 3, in look_up\n    return table[key]" in text


def test_a_cause_is_shown_once_with_an_error_and_with_its_line_where_a_cell_raises_it_again(kernel: Kernel) -> None:
    kernel.ok("""
    def fails():
        try:
            {}["first"]
        except KeyError as error:
            raise ValueError("second") from error
    """)
    cell = kernel.run("notebook_launcher(fails, num_processes=2)")
    assert len(cell.failure.traceback.splitlines()) < 40, cell.failure.traceback
    assert cell.failure.traceback.count("KeyError: 'first'") == 1
    cell = kernel.run("""
    try:
        notebook_launcher(fails, num_processes=2)
    except ValueError as error:
        cause = error.__cause__
    raise cause
    """)
    assert cell.failure.name == "KeyError"
    assert '{}["first"]' in cell.failure.traceback
    assert "raise cause" in cell.failure.traceback


@pytest.mark.parametrize(
    "call", ["input('how many? ')", "getpass()", "breakpoint()", "import pdb; pdb.set_trace()\n        print()"]
)
def test_asking_the_keyboard_in_a_worker_is_an_error_and_no_hang(kernel: Kernel, call: str) -> None:
    cell = kernel.run(f"""
    from getpass import getpass
    def asks():
        {call}
    notebook_launcher(asks, num_processes=2)
    """)
    assert cell.failure.name == "StateError"
    assert "has no keyboard" in cell.failure.text
    assert call != "breakpoint()" or "num_processes=1, engine='inline'" in cell.failure.text
    assert re.search(rf"Cell In\[{cell.number}\], line [34], in asks", cell.failure.text)
    assert "pdb" not in call or "(Pdb)" in cell.failure.text
