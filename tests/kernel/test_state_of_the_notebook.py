"""Whatever the notebook has done before, a launch works, and leaves the notebook as it was."""

import os
import re
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.kernel.kernels import Kernel

CONNECTED = """
def connected():
    from accelerate_nb import Accelerator
    accelerator = Accelerator()
    import torch
    everyone = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    return everyone, accelerator.num_processes, accelerator.is_main_process, accelerator.mixed_precision
"""


@pytest.mark.parametrize("before", ["Accelerator()", "PartialState()", "Accelerator(mixed_precision='no')"])
@pytest.mark.parametrize("method", ["supervisor", "fork", "spawn"])
def test_a_state_that_was_made_in_an_earlier_cell_does_not_matter(kernel: Kernel, before: str, method: str) -> None:
    kernel.ok("from accelerate_nb import Accelerator, PartialState")
    kernel.ok(f"made_before = {before}")
    kernel.ok(CONNECTED)
    kernel.ok(f"ranks = notebook_launcher(connected, num_processes=2, start_method={method!r}, results='all')")
    assert kernel.value("[(everyone, size, main) for everyone, size, main, _ in ranks]") == [
        [[0, 1], 2, True],
        [[0, 1], 2, False],
    ]
    assert kernel.value("[made_before.num_processes, made_before.process_index]") == [1, 0]


def test_a_port_that_is_busy_is_passed_over_or_reported_where_it_was_requested_and_a_free_one_is_used(
    kernel: Kernel,
) -> None:
    kernel.ok("""
    import os, torch.distributed as dist
    def meets():
        dist.init_process_group("gloo")
        dist.barrier()
        return os.environ["MASTER_PORT"]
    """)
    # Accelerate's own port
    with socket.create_server(("127.0.0.1", 29500)), socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        kernel.ok("met = notebook_launcher(meets, num_processes=2)")
        assert kernel.value("met") != "29500"
        cell = kernel.run(f"notebook_launcher(meets, num_processes=2, use_port={port})")
    assert cell.failure.name == "LaunchError"
    assert str(port) in cell.failure.text
    # twice: what the first launch leaves behind on the port is no obstacle
    for _ in range(2):
        kernel.ok(f"met = notebook_launcher(meets, num_processes=2, use_port={port})")
        assert kernel.value("met") == str(port)


def test_a_module_that_was_edited_is_the_new_one_in_the_next_launch(kernel: Kernel) -> None:
    for answer in ("first", "second, which is longer"):
        kernel.ok(f"""
        import os, sys
        from pathlib import Path
        Path("edited_module.py").write_text("answer = {answer!r}\\n")
        sys.path.insert(0, os.getcwd())
        def asks():
            import edited_module
            return edited_module.answer
        answered = notebook_launcher(asks, num_processes=2)
        """)
        assert kernel.value("answered") == answer


def held(kernel: Kernel) -> Counter[str]:
    """What the kernel and its supervisor hold that a launch could leak, counted by kind: descriptors by names as `socket`."""
    counted = Counter({"a process": len(kernel.workers())})
    for process in (psutil.Process(kernel.pid), kernel.supervisor()):
        counted["a thread"] += process.num_threads()
        counted["a connection"] += len(process.net_connections("all"))
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed while it was looked at
                counted[os.readlink(path).partition(":")[0]] += 1
    return counted


def grown(kernel: Kernel, before: Counter[str], launches: int) -> dict[str, int]:
    """The kinds of which there are more than before, by at least one for every so many launches; a kernel's own come and go."""
    # a kernel looks every ten seconds for what its streams still hold of threads that have ended
    deadline = time.monotonic() + 12
    while True:
        more = {resource: count for resource, count in (held(kernel) - before).items() if count >= launches}
        if not more or time.monotonic() > deadline:
            return more
        kernel.receive(0.5)


def test_launches_that_end_well_badly_or_late_leak_nothing(fresh_kernel: Kernel) -> None:
    fresh_kernel.ok("""
    import gc, os, torch, torch.distributed as dist
    weights = torch.ones(1000)
    def works(fail):
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        print("worked")
        if fail:
            raise KeyError("on purpose")
        return weights.sum()
    def launches(count):
        for number in range(count):
            method = ("supervisor", "supervisor", "fork", "supervisor", "spawn")[number % 5]
            try:
                notebook_launcher(works, (number % 2 == 1,), num_processes=2, start_method=method)
            except KeyError:
                pass
    """)
    fresh_kernel.ok("""
    import threading, time
    lock = threading.Lock()
    def cannot_travel():
        return lock
    def ends_badly():
        for function, settings in (
            (cannot_travel, {}),
            (print, {"num_processes": 0}),
            (lambda: time.sleep(60), {"timeout": 0.3}),
            (lambda: __import__("os")._exit(3), {}),
        ):
            try:
                notebook_launcher(function, **{"num_processes": 2, **settings})
            except Exception as error:
                pass
        run = launch(time.sleep, (60,), num_processes=2)
        run.stop()
    """)
    fresh_kernel.ok("launches(5)\nends_badly()\ngc.collect()")
    before = held(fresh_kernel)
    fresh_kernel.ok("launches(15)\nfor _ in range(3):\n    ends_badly()\ngc.collect()")
    # three of them were spawned, and three forked
    assert grown(fresh_kernel, before, launches=3) == {}


def test_a_first_launch_from_a_thread_that_ends_leaves_a_supervisor_that_works(fresh_kernel: Kernel) -> None:
    fresh_kernel.ok("""
    import threading
    from accelerate_nb.launching.engines import supervisor
    supervisor.cool()
    thread = threading.Thread(target=notebook_launcher, args=(print,), kwargs={"num_processes": 2})
    thread.start()
    thread.join()
    """)
    first = fresh_kernel.supervisor()
    fresh_kernel.ok("notebook_launcher(print, num_processes=2)")
    assert fresh_kernel.supervisor() == first


def test_a_rank_computes_with_its_share_of_the_cores_and_a_port_of_zero_is_any(kernel: Kernel) -> None:
    kernel.ok("""
    import os, torch
    def threads():
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
    shares = notebook_launcher(threads, num_processes=2, use_port="0", results="all")
    from accelerate_nb.devices.cpu import cores
    share = max(1, cores() // 2)
    """)
    assert kernel.value("shares == [(share, str(share))] * 2")


@pytest.mark.parametrize("method", ["supervisor", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_logging_that_the_notebook_configured_holds_in_ranks(kernel: Kernel, method: str) -> None:
    kernel.ok("""
    import logging, sys
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s of %(name)s: %(message)s", force=True)
    logging.getLogger("verbose").setLevel(logging.DEBUG)
    def logs():
        logging.info("hello")
        logging.getLogger("verbose").debug("detail")
        logging.getLogger("other").debug("hidden")
    """)
    kernel.ok(f"run = launch(logs, num_processes=2, start_method={method!r}, panel=False)\nrun.wait()")
    assert kernel.value("run.logs(1)").splitlines() == ["INFO of root: hello", "DEBUG of verbose: detail"]


def test_warnings_name_the_cell_and_its_line_in_ranks_and_in_the_notebook(kernel: Kernel) -> None:
    cell = kernel.ok("""
    import threading, warnings
    def warns():
        warnings.warn("careful")
        return {"lock": threading.Lock()}
    run = launch(warns, num_processes=1, panel=False)
    run.wait()
    """)
    assert re.search(r"^Cell In\[\d+\], line 6: UserWarning: .*result\['lock'\] is a lock", cell.stderr, re.MULTILINE)
    assert re.match(r"Cell In\[\d+\], line 3: UserWarning: careful\n", kernel.value("run.logs(0)"))


def test_the_store_is_there_until_the_last_rank_has_returned(kernel: Kernel) -> None:
    kernel.ok("""
    import os, time
    from torch.distributed import TCPStore
    def returns_late():
        if os.environ["RANK"] == "0":
            return "early"
        time.sleep(0.5)
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        store.set("said", "late")
        return store.get("said").decode()
    late = notebook_launcher(returns_late, num_processes=2, results="all")
    """)
    assert kernel.value("late") == ["early", "late"]
