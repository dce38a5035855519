"""A launch for which the system's limits have no room ends with a sentence: the limit, the need of the run, the way to raise it."""

import os
import re
import resource
import shutil
import subprocess
import sys

import pytest

from accelerate_nb import LaunchError, notebook_launcher
from accelerate_nb.failures.hints import advice_on
from accelerate_nb.failures.process_limits import check_limits, limit_reached
from accelerate_nb.launching import launcher
from accelerate_nb.launching.engines import supervisor
from tests.processes import python

TWO = {"num_processes": 2, "cpu": True, "config_file": "", "panel": "off"}
SCRIPT = """
import os, resource, sys
from accelerate_nb.failures.process_limits import check_limits
resource.setrlimit(getattr(resource, f"RLIMIT_{sys.argv[1]}"), (int(sys.argv[2]),) * 2)
if os.getuid() == 0 and sys.argv[1] == "NPROC":
    os.setuid(54321)
check_limits(int(sys.argv[3]))
"""


@pytest.mark.parametrize("ranks", [10**5, 10**9])
def test_more_processes_than_can_be_are_refused_at_once(ranks: int) -> None:
    with pytest.raises(LaunchError, match=rf"num_processes={ranks} was requested, but .*fewer processes"):
        notebook_launcher(os.getpid, **{**TWO, "num_processes": ranks})


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize(
    ("name", "limit", "ranks", "sentence"),
    [
        ("NOFILE", 96, 8, "96 is the limit of files .* of 8 ranks needs about 96. Raise it .`ulimit -n 65535`"),
        ("NPROC", 24, 8, "24 is the limit of processes and threads of this user.* about 44. Raise it .`ulimit -u"),
        ("AS", 600 << 20, 2, "600 MiB is the limit of bytes .* needs about 768 MiB. Raise it .`ulimit -v unlimited`"),
    ],
)
def test_a_low_limit_refuses_a_launch_with_what_it_needs(name: str, limit: int, ranks: int, sentence: str) -> None:
    done = python("-c", SCRIPT, name, str(limit), str(ranks))
    assert re.search(f"LaunchError: num_processes={ranks} was requested, but {sentence}", done.stderr), done.stderr


def test_a_launch_that_reaches_the_limit_of_files_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notebook_launcher(os.getppid, **TWO) == supervisor.warm().pid
    monkeypatch.setattr(launcher, "check_limits", lambda _: None)
    before, (_, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    for left in range(20, 38):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + left, hard))
        try:
            with pytest.raises(LaunchError, match=r"num_processes=8 was requested, but .* is the limit of files"):
                notebook_launcher(os.getppid, **{**TWO, "num_processes": 8})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert len(os.listdir("/proc/self/fd")) <= before + 4, f"with {left} left"
    assert notebook_launcher(os.getppid, **TWO) == supervisor.warm().pid


def test_errors_with_the_same_words_are_not_taken_for_a_limit() -> None:
    assert limit_reached(BlockingIOError(11, "Resource temporarily unavailable"), 2) == ""
    assert advice_on(ValueError("Too many open files of this kind")) == ""
    check_limits(2)


REFUSED = """
import os
from accelerate_nb.launching import launcher
from accelerate_nb import notebook_launcher
launcher.check_limits = lambda _: None
options = dict(cpu=True, config_file='', panel='off')
first = notebook_launcher(os.getppid, num_processes=1, **options)
try:
    notebook_launcher(os.getppid, num_processes=24, **options)
except Exception as error:
    print(type(error).__name__, error)
print(notebook_launcher(os.getppid, num_processes=1, **options) == first)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root")
def test_a_fork_that_a_limit_refuses_is_a_sentence_and_the_supervisor_goes_on(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path[:0] = {[path for path in sys.path if path]}\n{REFUSED}")
    tmp_path.chmod(0o777)
    capabilities = "-all,+dac_override,+dac_read_search"
    command = ["setpriv", "--reuid=54322", "--regid=54322", "--clear-groups"]
    command += [f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", sys.executable, str(script)]
    done = subprocess.run(
        command,
        env={**os.environ, "HOME": str(tmp_path), "ACCELERATE_NB_FOLDER": str(tmp_path / "runs")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (20, 20)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done
    error, goes_on = done.stdout.splitlines()
    assert error.startswith("LaunchError num_processes=24 was requested, but 20 is the limit of processes"), done
    assert goes_on == "True"
