"""What ranks write is shown under their ranks, kept whole, and never too much for the notebook."""

from __future__ import annotations

import base64
import re
from itertools import pairwise

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
        assert kept == [
            f"rank {rank} writes its line {line:06d} of a long training log with numbers 0.12345 0.67890"
            for line in range(25_000)
        ]
        shown = [line for line in of_rank(cell, rank) if "writes" in line]
        assert set(shown) <= set(kept)
        assert shown[-1] == kept[-1]
    assert kernel.value("str(flood.folder)") in cell.text


def test_lines_never_mix_and_each_has_its_rank(kernel: Kernel) -> None:
    cell = kernel.ok("""
    import os, sys
    def writes():
        rank = os.environ["RANK"]
        for line in range(100):
            print("rank", rank, "line", line)
            sys.stdout.write("half of it")
            sys.stdout.flush()
            sys.stdout.write(f" and the rest {rank}.{line}\\n")
    notebook_launcher(writes, num_processes=4)
    """)
    assert len(cell.stdout.splitlines()) == 800
    for rank in range(4):
        assert of_rank(cell, rank) == [
            text
            for line in range(100)
            for text in (f"rank {rank} line {line}", f"half of it and the rest {rank}.{line}")
        ]


@pytest.mark.parametrize("method", ["supervisor", "fork", "spawn"])
def test_output_from_below_python_is_shown_under_its_rank(kernel: Kernel, method: str) -> None:
    cell = kernel.ok(f"""
    import ctypes, os, subprocess, sys
    def writes_below():
        os.write(1, b"from the descriptor\\n")
        os.write(2, b"from the error descriptor\\n")
        libc = ctypes.CDLL(None)
        libc.printf(b"from C %d\\n", 42)
        libc.fflush(None)
        subprocess.run(["echo", "from a program"])
        os.system("echo from a shell 1>&2")
        print("no newline at the end", end="")
    notebook_launcher(writes_below, num_processes=2, start_method={method!r})
    """)
    for rank in range(2):
        assert sorted(of_rank(cell, rank)) == sorted(
            [
                "from the descriptor",
                "from C 42",
                "from a program",
                "no newline at the end",
                "from the error descriptor",
                "from a shell",
            ]
        )


def test_the_last_words_of_c_are_shown_without_a_flush(kernel: Kernel) -> None:
    cell = kernel.run("""
    import ctypes, os
    def prints_in_c():
        ctypes.CDLL(None).printf(b"C's last words\\n")
        os._exit(5)
    notebook_launcher(prints_in_c, num_processes=2)
    """)
    assert cell.error is not None
    assert "C's last words" in cell.error.text


def test_bytes_that_are_no_text_are_kept_as_they_are_and_shown_as_escapes(kernel: Kernel) -> None:
    cell = kernel.ok(r"""
    import os
    def writes_bytes():
        os.write(1, b"caf\xe9 \xff\xfe\n")
        print("an umlaut: ä, a snowman: ☃, a surrogate: \udce9")
    bytes_run = launch(writes_bytes, num_processes=2)
    bytes_run.wait()
    """)
    for rank in range(2):
        assert of_rank(cell, rank)[0] == r"caf\xe9 \xff\xfe"
        assert of_rank(cell, rank)[1].startswith("an umlaut: ä, a snowman: ☃, a surrogate: ")
    assert kernel.value(
        "(bytes_run.folder / 'rank_0.log').read_bytes().startswith(bytes([99, 97, 102, 0xe9, 32, 0xff]))"
    )


def test_colours_stay_and_cursor_movements_go(kernel: Kernel) -> None:
    cell = kernel.ok(r"""
    def colours():
        print("\x1b[31mred\x1b[0m and \x1b[2Kcleared \x1b[1Aup")
    notebook_launcher(colours, num_processes=2)
    """)
    assert cell.stdout.count("\x1b[31mred\x1b[0m") == 2
    assert "\x1b[2K" not in cell.stdout
    assert "\x1b[1A" not in cell.stdout


def test_a_very_long_line_is_cut_in_the_cell_and_whole_in_the_folder(kernel: Kernel) -> None:
    cell = kernel.ok("""
    def long_line():
        print("x" * 3_000_000 + "end")
        print("after it")
    long_run = launch(long_line, num_processes=2)
    long_run.wait()
    """)
    assert cell.saved_size() < 100_000
    assert kernel.value("[len(long_run.logs(rank)) for rank in range(2)]") == [3_000_004 + len("after it\n")] * 2
    assert kernel.value("long_run.logs(1).splitlines()[0][-6:]") == "xxxend"
    assert "after it" in of_rank(cell, 0)


def test_warnings_and_logging_of_each_rank_are_shown(kernel: Kernel) -> None:
    cell = kernel.ok("""
    import logging, os, warnings
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logger = logging.getLogger("training")
    def warns():
        rank = os.environ["RANK"]
        warnings.warn(f"careful {rank}")
        logging.getLogger("training").warning("logged by %s", rank)
    notebook_launcher(warns, num_processes=2)
    """)
    for rank in range(2):
        text = "\n".join(of_rank(cell, rank))
        assert f"UserWarning: careful {rank}" in text
        assert f"logged by {rank}" in text
        # the warning shows the cell's own line
        assert 'warnings.warn(f"careful {rank}")' in text


def test_progress_bars_are_one_line_a_rank(kernel: Kernel) -> None:
    cell = kernel.ok("""
    import time
    from tqdm.auto import tqdm
    from tqdm import tqdm as plain
    def bars():
        for bar in (tqdm, plain):
            for step in bar(range(40), desc=bar.__module__, mininterval=0):
                time.sleep(0.005)
    notebook_launcher(bars, num_processes=2)
    """)
    for rank in range(2):
        lines = [line for line in of_rank(cell, rank) if "it/s" in line]
        assert len(lines) == 2
        assert all("100%" in line and "40/40" in line for line in lines)
    # what stood there while they moved was drawn over
    assert not any("it/s" in str(shown.get("text/plain", "")) for shown in cell.displays)
    assert cell.saved_size() < 5_000


def test_nested_bars_leave_one_line_a_rank_and_move_in_place(kernel: Kernel) -> None:
    cell = kernel.ok("""
    def nests():
        from tqdm.auto import tqdm
        for epoch in tqdm(range(3), desc="outer"):
            for step in tqdm(range(40), leave=False, mininterval=0):
                pass
            print("epoch", epoch)
    notebook_launcher(nests, num_processes=2)
    """)
    for rank in range(2):
        *epochs, bar = sorted(of_rank(cell, rank))
        assert epochs == ["epoch 0", "epoch 1", "epoch 2"]
        assert bar.startswith("outer: 100%|██████████| 3/3 [")


def test_a_moving_bar_is_drawn_in_place(kernel: Kernel) -> None:
    cell = kernel.start("""
    import os, time
    from tqdm import tqdm
    def moves(path):
        bar = tqdm(total=100, mininterval=0)
        for _ in range(50):
            bar.update()
            time.sleep(0.01)
        while not os.path.exists(path):
            time.sleep(0.02)
        bar.update(50)
        bar.close()
    go_on = os.path.abspath("go_on")
    notebook_launcher(moves, (go_on,), num_processes=2)
    """)
    # one display that holds both ranks' bars, updated
    cell.until(lambda: any(str(shown.get("text/plain")).count("50/100") == 2 for shown in cell.displays))
    assert len(cell.displays) == 1
    cell.kernel.interrupt()
    cell.wait()


def test_displays_of_ranks_are_shown_under_their_label(kernel: Kernel) -> None:
    cell = kernel.ok("""
    import os
    from IPython.display import HTML, Markdown, display
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
    notebook_launcher(shows, num_processes=2)
    """)
    html = [shown.get("text/html") for shown in cell.displays]
    assert "<b>bold</b>" in html
    assert any("a cell's own class" in str(item) for item in html)
    assert any(shown.get("text/markdown") == "*marked*" for shown in cell.displays)
    assert cell.stdout.count("[1]") >= 3
    assert "[1] {'a': 1}" in cell.stdout


def test_figures_of_ranks_are_shown(kernel: Kernel) -> None:
    pytest.importorskip("matplotlib")
    cell = kernel.ok("""
    def draws():
        import matplotlib.pyplot as plt
        figure, axes = plt.subplots(figsize=(2, 2))
        axes.plot([1, 2, 3])
        display(figure)
        plt.close(figure)
    notebook_launcher(draws, num_processes=2)
    """)
    pictures = [shown["image/png"] for shown in cell.displays if "image/png" in shown]
    assert len(pictures) == 2
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)


def test_output_comes_while_the_ranks_run(kernel: Kernel) -> None:
    cell = kernel.start("""
    import time
    def speaks_early():
        print("early", flush=True)
        time.sleep(60)
    notebook_launcher(speaks_early, num_processes=2)
    """)
    cell.until_output("[1] early")
    assert not cell.done
    kernel.interrupt()
    cell.wait()


def test_lines_of_one_rank_keep_their_order(kernel: Kernel) -> None:
    cell = kernel.ok("""
    def counts():
        for number in range(1500):
            print(number)
    notebook_launcher(counts, num_processes=1)
    """)
    numbers = [int(line) for line in of_rank(cell, 0) if re.fullmatch(r"\d+", line)]
    assert len(numbers) == 1500
    assert all(before < after for before, after in pairwise(numbers))


def test_a_prefix_can_be_chosen(kernel: Kernel) -> None:
    cell = kernel.ok(
        "notebook_launcher(lambda: print('hello'), num_processes=2, log_line_prefix_template='<${role_name}${rank}> ')"
    )
    assert sorted(cell.stdout.split("\n")[:2]) == ["<default0> hello", "<default1> hello"]
