"""What ranks write is shown under their ranks, kept whole, and never too much for the notebook."""

import base64

import pytest

from tests.kernel.kernels import Cell, Kernel, without_colours

MEGABYTE = 1_000_000


def of_rank(cell: Cell, rank: int) -> list[str]:
    """The lines that a cell shows of a rank, on either stream, without labels and colours."""
    lines = without_colours(cell.stdout + cell.stderr).splitlines()
    return [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}]")]


@pytest.mark.slow
def test_a_flood_of_lines_is_kept_whole_bounded_in_the_cell_and_leaves_the_kernel_responsive(kernel: Kernel) -> None:
    cell = kernel.start("""
    import os
    def floods(count):
        rank = os.environ["RANK"]
        for line in range(count):
            print(f"rank {rank} writes its line {line:06d} of a long training log with numbers 0.12345 0.67890")
    flood = launch(floods, (25_000,), num_processes=4)
    flood.wait()
    """)
    waits = []
    cell.until(lambda: bool(cell.outputs) or cell.done)
    while not cell.done:
        waits.append(kernel.answers(timeout=5))
        kernel.receive(0.05)
    cell.result()
    assert max(waits) < 2
    assert kernel.beats
    assert cell.saved_size() < MEGABYTE
    for rank in range(4):
        kept = kernel.value(f"flood.logs({rank})").splitlines()
        text = "rank {} writes its line {:06d} of a long training log with numbers 0.12345 0.67890"
        assert kept == [text.format(rank, line) for line in range(25_000)]
        shown = [line for line in of_rank(cell, rank) if "writes" in line]
        assert set(shown) <= set(kept)
        assert shown[-1] == kept[-1]
    assert kernel.value("str(flood.folder)") in cell.text


def test_the_last_words_of_c_are_shown_without_a_flush(kernel: Kernel) -> None:
    cell = kernel.run("""
    import ctypes, os
    def prints_in_c():
        ctypes.CDLL(None).printf(b"C's last words\\n")
        os._exit(5)
    notebook_launcher(prints_in_c, num_processes=2)
    """)
    assert "C's last words" in cell.failure.text


def test_displays_and_figures_of_ranks_are_shown_under_their_label(kernel: Kernel) -> None:
    pytest.importorskip("matplotlib")
    cell = kernel.ok("""
    import os
    from IPython.display import HTML, Markdown
    class Table:
        def _repr_html_(self):
            return "<table><tr><td>a cell's own class</td></tr></table>"
        def __repr__(self):
            return "a plain table"
    def shows():
        if os.environ["RANK"] == "1":
            display(HTML("<b>bold</b>"), Table())
            display(Markdown("*marked*"))
            from IPython.display import display as another
            another({"a": 1})
        import matplotlib.pyplot as plt
        figure, axes = plt.subplots(figsize=(2, 2))
        axes.plot([1, 2, 3])
        display(figure)
        plt.close(figure)
    notebook_launcher(shows, num_processes=2)
    """)
    html = [shown.get("text/html") for shown in cell.displays]
    assert "<b>bold</b>" in html
    assert any("a cell's own class" in str(item) for item in html)
    assert any(shown.get("text/markdown") == "*marked*" for shown in cell.displays)
    assert cell.stdout.count("[1]") >= 4
    assert "[1] {'a': 1}" in cell.stdout
    pictures = [shown["image/png"] for shown in cell.displays if "image/png" in shown]
    assert len(pictures) == 2
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)


def test_a_function_runs_shell_commands_and_magics_in_its_rank(kernel: Kernel) -> None:
    cell = kernel.ok("""
    import os
    def runs():
        !echo from the shell
        found = !echo captured
        %env MINE=yes
        return list(found), os.environ["MINE"]
    print("returned", notebook_launcher(runs, num_processes=1), os.environ.get("MINE"))
    """)
    assert "[0] from the shell" in cell.stdout
    assert "returned (['captured'], 'yes') None" in cell.stdout


def test_what_a_rank_displays_under_an_id_is_replaced(kernel: Kernel) -> None:
    cell = kernel.ok("""
    from IPython.display import HTML, update_display
    def shows():
        handle, empty = display(HTML("one"), display_id=True), display(display_id="mine")
        handle.update(HTML("two"))
        empty.update(HTML("three"))
        update_display(HTML("four"), display_id="mine")
    notebook_launcher(shows, num_processes=1)
    """)
    html = [shown.get("text/html") for shown in cell.displays]
    assert [text for text in html if text in {"one", "two", "three", "four"}] == ["two", "four"]
