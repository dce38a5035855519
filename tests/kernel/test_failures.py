"""A worker that fails is told in the cell: which rank, why, and where in the notebook."""

from __future__ import annotations

from tests.kernel.kernels import Cell, Kernel


def raised(cell: Cell) -> str:
    """The text of what a cell raised, whose notebook traceback must be short."""
    assert cell.error is not None, cell.text
    assert len(cell.error.traceback.splitlines()) < 40, cell.error.traceback
    return cell.error.text


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
    text = raised(cell)
    assert cell.error is not None
    assert cell.error.name == "KeyError"
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
    raised(cell)
    assert cell.error is not None
    assert cell.error.traceback.count("KeyError: 'the first'") == 1


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
    assert cell.error is not None
    assert cell.error.name == "KeyError"
    assert '{}["first"]' in cell.error.traceback
    assert "raise cause" in cell.error.traceback


def test_a_rank_that_dies_in_a_collective_leads(kernel: Kernel) -> None:
    cell = kernel.run("""
    import os, torch, torch.distributed as dist
    def dies():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            print("last words", flush=True)
            os._exit(9)
        dist.all_reduce(torch.ones(1))
    notebook_launcher(dies, num_processes=2)
    """)
    text = raised(cell)
    assert text.startswith("rank 1 ended with exit code 9")
    assert "last words" in text


def test_a_memory_limit_of_torch_is_reported_where_it_was_met(kernel: Kernel) -> None:
    cell = kernel.run("""
    import os, resource, time, torch
    def grows():
        if os.environ["RANK"] == "1":
            size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (128 << 20),) * 2)
            held = [torch.ones(16 << 20) for _ in range(8)]
        time.sleep(60)
    notebook_launcher(grows, num_processes=2)
    """)
    text = raised(cell)
    assert text.startswith("rank 1 stopped with RuntimeError")
    assert "allocate" in text
    assert "held = [torch.ones" in text
