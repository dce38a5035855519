"""Cells that run on every rank of a session, in a real kernel, as a person would write them."""

import os
import signal
from collections.abc import Iterator

import IPython
import pytest

from tests.kernel.kernels import Kernel, kernel as started


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with the extension, which the tests of this file share."""
    with started(tmp_path_factory.mktemp("cells")) as running:
        running.ok("%load_ext accelerate_nb")
        yield running


@pytest.fixture
def two(notebook: Kernel) -> Kernel:
    """The same, with a session of two ranks, in which other tests have run cells before."""
    notebook.ok("%%accelerate -n 2\npass")
    return notebook


def test_equal_output_is_folded_and_only_errors_are_on_standard_error(two: Kernel) -> None:
    cell = two.ok("""
    %%accelerate
    import logging, sys
    print("hello")
    print(f"I am {rank}")
    print("told", file=sys.stderr)
    logging.warning("slow")
    logging.error("wrong")
    """)
    assert cell.stdout.splitlines() == [
        "[0-1] hello",
        "[0]   I am 0",
        "[1]   I am 1",
        "[0-1] told",
        "\x1b[93m[0-1] WARNING:root:slow\x1b[0m",
    ]
    assert cell.stderr.splitlines() == ["[0-1] ERROR:root:wrong"]


def test_values_of_the_last_expression_are_shown(two: Kernel) -> None:
    assert two.ok("%%accelerate\n1 + 1").stdout.splitlines() == ["[0-1] 2"]
    assert two.ok("%%accelerate\nrank").stdout.splitlines() == ["[0]   0", "[1]   1"]
    assert two.ok("%%accelerate\nrank;").text.strip() == ""


def test_a_display_that_is_updated_is_replaced_also_from_a_later_cell(two: Kernel) -> None:
    cell = two.ok("""
    %%accelerate
    from IPython.display import HTML
    handle = display(HTML(f"<b>first of {rank}</b>"), display_id=True)
    for number in range(50):
        handle.update(HTML(f"<b>{number} of {rank}</b>"))
    """)
    assert [display["text/html"] for display in cell.displays] == ["<b>49 of 0</b>"]
    later = two.ok("%%accelerate\nhandle.update(HTML('<b>later</b>'))")
    assert later.displays == []
    assert [display["text/html"] for display in cell.displays] == ["<b>later</b>"]


def test_how_a_cell_is_shown_can_change_without_a_new_session(two: Kernel) -> None:
    two.ok("%%accelerate\nkept = 1")
    cell = two.ok("%%accelerate --log-line-prefix-template '<${rank}> ' --stop-grace-period 3\nprint(kept)")
    assert cell.stdout.splitlines() == ["<0-1> 1"]
    two.ok("%accelerate restart")
    assert two.ok("%%accelerate\nprint(kept := 2)").stdout.splitlines()[-1] == "<0-1> 2"
    assert two.ok("%%accelerate -n 2 --log-line-prefix-template ''\nprint(2)").stdout.splitlines()[-1] == "2"
    two.ok("%accelerate stop")


def test_a_cell_in_the_panel_leaves_a_report_and_its_values(two: Kernel) -> None:
    two.ok("%%accelerate --panel text\nprint('of a former cell')")
    cell = two.ok("%%accelerate --panel widget\nprint('hello from', rank)\n6 * 7")
    (report, *_) = (display["text/html"] for display in cell.displays if "text/html" in display)
    assert "hello from 1" in report
    assert "finished" in report
    assert "of a former cell" not in report
    assert "[0-1] 42" in cell.stdout
    failed = two.run("%%accelerate\nif rank: raise ValueError('wrong')")
    assert failed.failure.name == "ValueError"
    assert "wrong" in failed.displays[0]["text/html"]
    two.ok("%%accelerate --panel text\npass")


def test_collectives_work_and_tensors_come_to_the_notebook(two: Kernel) -> None:
    two.ok("""
    %%accelerate
    import torch
    weights = torch.arange(3.0, device=device, requires_grad=True) + rank
    total = accelerator.reduce(weights.detach(), reduction="sum")
    """)
    cell = two.ok("%accelerate pull total")
    assert "total is in the notebook now, from rank 0: Tensor of shape (3,), float32" in cell.stdout
    assert two.value("total.tolist()") == [1.0, 3.0, 5.0]
    two.ok("%accelerate pull weights --rank 1")
    assert two.value("[weights.tolist(), weights.requires_grad]") == [[1.0, 2.0, 3.0], False]
    two.ok("%accelerate pull weights --all")
    assert two.value("[one.tolist() for one in weights]") == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    error = two.run("%accelerate pull no_such_name").failure
    assert error.name == "NameError"
    assert "no_such_name" in error.traceback
    assert "There are: " in error.traceback
    assert len(error.traceback.splitlines()) == 1


def test_values_of_the_notebook_go_to_every_rank(two: Kernel) -> None:
    two.ok("import torch\ntable = torch.ones(2, 3)\nrate = 0.5")
    output = two.ok("%accelerate push table rate").stdout
    assert "table is on ranks 0-1 now: Tensor of shape (2, 3), float32" in output
    assert "rate is on ranks 0-1 now: 0.5" in output
    assert two.ok("%%accelerate\nprint((table * rate).sum().item())").stdout == "[0-1] 3.0\n"


def test_a_function_of_the_notebook_is_called_on_every_rank(two: Kernel) -> None:
    cell = two.ok("""
    offset = 100
    def shifted(number, *, by):
        import os
        print("called")
        return number + by + offset + int(os.environ["RANK"])
    came = %accelerate run shifted(1, by={"a": 10}["a"])
    """)
    assert cell.stdout == "[0-1] called\n"
    assert two.value("came") == 111


def test_a_cell_runs_on_some_ranks(two: Kernel) -> None:
    assert two.ok("%%accelerate --ranks 1\nprint(rank)").stdout == "[1]   1\n"
    assert "the session has the ranks 0-1" in two.run("%%accelerate --ranks 2\npass").failure.text


def test_a_table_is_shown_once_where_it_is_equal_and_of_every_rank_where_that_is_requested(two: Kernel) -> None:
    made = "from IPython.display import HTML, display\n"
    cell = two.ok(f"%%accelerate\n{made}display(HTML('<b>same</b>'))\nHTML('<i>last</i>')")
    assert [display.get("text/html") for display in cell.displays] == ["<b>same</b>", "<i>last</i>"]
    cell = two.ok(f"%%accelerate --displays all\n{made}display(HTML(f'<b>{{rank}}</b>'))")
    assert [display.get("text/html") for display in cell.displays] == ["<b>0</b>", "<b>1</b>"]


def test_another_setting_starts_the_session_anew_and_reports_why(notebook: Kernel) -> None:
    notebook.ok("%%accelerate -n 2\nkept = 1")
    assert notebook.ok("%%accelerate -n 2\nprint('kept' in globals())").stdout == "[0-1] True\n"
    cell = notebook.ok(
        "%%accelerate -n 2 --mixed-precision bf16\nprint('kept' in globals(), accelerator.mixed_precision)"
    )
    assert "restarts (mixed_precision was not set and is bf16 now); its variables are gone" in cell.stdout
    assert cell.stdout.splitlines()[-1] == "[0-1] False bf16"
    cell = notebook.ok("%%accelerate --restart --mixed-precision no\nprint(world_size, accelerator.mixed_precision)")
    assert cell.stdout.splitlines()[-1] == "[0-1] 2 no"
    # a form is for the next session, and wins over earlier cells' flags where it was changed since the last start
    notebook.ok("""
    form = {"gradient_accumulation_steps": 4, "num_processes": 1}
    get_ipython().find_cell_magic("accelerate").kept.picked = lambda: form
    """)
    steps = "print(world_size, accelerator.gradient_accumulation_steps)"
    assert notebook.ok(f"%%accelerate\n{steps}").stdout == "[0-1] 2 1\n"
    cell = notebook.ok(f"%%accelerate --restart\n{steps}")
    assert "restarts (as requested)" in cell.stdout
    assert "From the form: gradient_accumulation_steps=4, num_processes=1.\n" in cell.stdout
    assert cell.stdout.splitlines()[-1] == "[0] 1 4"
    notebook.ok("form['gradient_accumulation_steps'] = 1\n%accelerate restart -n 2")
    notebook.ok("%accelerate restart")
    assert notebook.ok(f"%%accelerate\n{steps}").stdout == "[0-1] 2 1\n"
    notebook.ok("form.clear()\n%accelerate restart -n 2")


def test_an_error_is_shown_with_the_cells_own_lines_and_the_session_goes_on(two: Kernel) -> None:
    two.ok("%%accelerate\nstays = 7")
    cell = two.run("""
    %%accelerate
    def divide(by):
        return 1 / by

    divide(rank)
    """)
    assert cell.failure.name == "ZeroDivisionError"
    text = cell.failure.traceback
    assert "rank 0" in text
    assert f"Cell In[{cell.number}], line 3" in text
    assert "return 1 / by" in text
    assert "The session goes on" in text
    for noise in ("run_cell_magic", "magic.py", "interactiveshell"):
        assert noise not in text
    assert two.ok("%%accelerate\nprint(stays)").stdout == "[0-1] 7\n"


def test_an_interrupt_stops_the_cell_and_not_the_session(two: Kernel) -> None:
    two.ok("%%accelerate\nstays = 8")
    cell = two.start("%%accelerate\nimport time\nprint('began')\nwhile True: time.sleep(0.01)")
    cell.until_output("began")
    two.interrupt()
    assert cell.wait(30).failure.name == "KeyboardInterrupt"
    assert "The session goes on" in cell.failure.traceback
    assert two.ok("%%accelerate\nprint(stays)").stdout == "[0-1] 8\n"


def test_a_cell_has_its_time(two: Kernel) -> None:
    cell = two.run("%%accelerate --timeout 0.5\nimport time\ntime.sleep(60)")
    assert "0.5" in cell.failure.traceback
    assert two.ok("%%accelerate\nprint('on')").stdout == "[0-1] on\n"


def test_a_worker_that_dies_reports_its_last_lines_and_the_next_cell_starts_a_new_session(two: Kernel) -> None:
    cell = two.run("""
    %%accelerate
    import os
    if rank == 1:
        print("last words", flush=True)
        os._exit(3)
    import time
    time.sleep(60)
    """)
    assert "last words" in cell.text
    assert "The next %%accelerate cell starts a new one" in cell.failure.traceback
    cell = two.ok("%%accelerate\nprint(world_size)")
    assert "The session has ended, and its variables are gone" in cell.stdout
    assert cell.stdout.splitlines()[-1] == "[0-1] 2"


def test_a_worker_that_is_killed_between_cells_is_reported(two: Kernel) -> None:
    two.ok("%%accelerate\nimport os\npid = os.getpid()")
    two.ok("%accelerate pull pid --rank 1")
    os.kill(two.value("pid"), signal.SIGKILL)
    two.ok("""
    import time
    session = get_ipython().find_cell_magic("accelerate").kept.session
    while session.alive:
        time.sleep(0.01)
    """)
    assert "has ended" in two.ok("%accelerate").text
    assert "rank 1 ended with SIGKILL" in two.run("%accelerate pull pid").failure.text
    cell = two.ok("%%accelerate\nprint('back')")
    assert "SIGKILL" in cell.stdout
    assert cell.stdout.splitlines()[-1] == "[0-1] back"


def test_a_cell_goes_to_both_sides(two: Kernel) -> None:
    cell = two.ok("""
    %%accelerate --local
    class Model:
        size = 3
    def twice(x):
        return 2 * x
    """)
    assert cell.text.strip() == ""
    assert two.value("twice(Model.size)") == 6
    assert two.ok("%%accelerate\nprint(twice(Model.size))").stdout == "[0-1] 6\n"
    # what fails in the notebook is not run on the ranks
    cell = two.run("%%accelerate --local\nprint('here')\n1 / 0")
    assert (cell.failure.name, cell.stdout) == ("ZeroDivisionError", "here\n")


def test_a_cell_in_the_background_gives_the_notebook_back_and_its_output_goes_on(two: Kernel) -> None:
    cell = two.run("""
    %%accelerate --background
    import time, pathlib
    print("began")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    print("went on")
    """)
    assert "runs on ranks 0-1 in the background" in cell.text
    assert two.value("1 + 1") == 2
    assert "runs" in two.ok("%accelerate status").text
    assert "runs in the background already" in two.run("%%accelerate --background\npass").failure.text
    behind = two.start("%%accelerate\nprint('behind')")
    behind.until_output("waits for")
    two.interrupt()
    assert behind.wait(30).error is not None
    assert two.value("get_ipython().find_cell_magic('accelerate').kept.background.done") is False
    two.ok("import pathlib\npathlib.Path('go').touch()\n%accelerate wait")
    if IPython.version_info >= (8,):  # before, kernels show what a thread writes under the cell that runs
        assert cell.stdout.splitlines() == ["[0-1] began", "[0-1] went on"]
    assert two.ok("%%accelerate\nprint('next')").stdout == "[0-1] next\n"


def test_a_cell_in_the_background_can_be_interrupted_and_reports_its_error_under_its_cell(two: Kernel) -> None:
    cell = two.ok("%%accelerate --background\nimport time\nwhile True: time.sleep(0.01)")
    assert "was interrupted" in two.ok("%accelerate interrupt").stdout
    assert two.run("%accelerate wait").error is not None
    assert "Interrupt" in cell.stderr or IPython.version_info < (8,)
    assert two.ok("%%accelerate\nprint('next')").stdout == "[0-1] next\n"


def test_status_stacks_and_logs_show_the_session(two: Kernel) -> None:
    two.ok("%%accelerate\nprint('in the log')")
    status = two.ok("%accelerate").displays[-1]
    assert "A session of 2 processes is ready" in status["text/plain"]
    assert "A session of 2 processes is ready" in status["text/html"]
    assert "num_processes=2" in status["text/plain"]
    logs = two.ok("%accelerate logs --rank 1 --lines 1").stdout
    assert "in the log" in logs
    assert "rank 0" not in logs
    assert two.ok("%accelerate stacks").stdout == "Every rank waits for a cell.\n"


def test_stopped_and_started_again(two: Kernel) -> None:
    assert "has ended" in two.ok("%accelerate stop").stdout
    assert two.workers() == []
    assert "No session" in two.ok("%accelerate").text
    cell = two.ok("%%accelerate -n 2\nprint('again')")
    assert "2 processes are ready after" in cell.stdout
    assert cell.stdout.splitlines()[-1] == "[0-1] again"


def test_unloading_the_extension_ends_the_session_and_loading_it_again_works(two: Kernel) -> None:
    two.ok("%unload_ext accelerate_nb")
    assert two.run("%%accelerate\npass").error is not None or "not found" in two.run("%%accelerate\npass").text
    two.ok("%load_ext accelerate_nb")
    assert two.ok("%%accelerate -n 2\nprint(1)").stdout.splitlines()[-1] == "[0-1] 1"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("notebook_launcher(train, gradient_acc", ["gradient_accumulation_steps="]),
        ("launch(train, (1, 'engine='), hang_warn", ["hang_warning_after="]),
        ('notebook_launcher(train, mixed_precision="b', ["bf16"]),
        ("launch(\n    train,\n    start_method='s", ["supervisor", "spawn"]),
        ("accelerate_nb.launch(train, panel=", ['"auto"', '"widget"', '"html"', '"text"', '"off"']),
        ("launch(train, cpu=", ["True", "False"]),
        ("print(launch(train).start(), engine='inl", []),
    ],
)
def test_settings_of_launchers_and_their_values_are_completed(two: Kernel, text: str, found: list[str]) -> None:
    if IPython.version_info < (8, 6):
        pytest.skip("IPython asks others for completions from 8.6 on")
    two.ok("import accelerate_nb\nfrom accelerate_nb import launch, notebook_launcher")
    assert two.value(f"get_ipython().kernel.do_complete({text!r}, {len(text)})['matches']") == found
