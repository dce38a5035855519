"""A worker that fails is told in the cell: which rank, why, and where in the notebook."""

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


def test_an_uncaught_error_reports_its_causes_once(kernel: Kernel) -> None:
    cell = kernel.run("""
    def fails():
        try:
            {}["the first"]
        except KeyError as error:
            raise ValueError("the second") from error
    notebook_launcher(fails, num_processes=2)
    """)
    assert len(cell.failure.traceback.splitlines()) < 40, cell.failure.traceback
    assert cell.failure.traceback.count("KeyError: 'the first'") == 1


def test_a_cause_that_a_cell_raises_again_is_shown_with_its_line(kernel: Kernel) -> None:
    cell = kernel.run("""
    def fails():
        try:
            {}["first"]
        except KeyError as error:
            raise ValueError("second") from error
    try:
        notebook_launcher(fails, num_processes=2)
    except ValueError as error:
        cause = error.__cause__
    raise cause
    """)
    assert cell.failure.name == "KeyError"
    assert '{}["first"]' in cell.failure.traceback
    assert "raise cause" in cell.failure.traceback
