"""Cells that run detached: they begin with what the notebook knows, outlive it, and are found again."""

from pathlib import Path

from tests.kernel.kernels import kernel as started

BEGIN = """
%load_ext accelerate_nb
import time
import accelerate_nb
words = ["one", "two"]
class Doubles:
    def __call__(self, x):
        return 2 * x
def doubled(x):
    return Doubles()(x)
"""
GOES_ON = """
%%accelerate -n 2 --detach
import pathlib
for word in words:
    print(rank, word, doubled(world_size))
while not pathlib.Path({go!r}).exists():
    time.sleep(0.05)
print("goes on")
"""


def test_a_detached_cell_knows_the_notebooks_variables_outlives_its_kernel_and_shows_its_lines(tmp_path: Path) -> None:
    go, environment = str(tmp_path / "go"), {"ACCELERATE_NB_FOLDER": str(tmp_path / "runs")}
    with started(tmp_path, **environment) as first, started(tmp_path, **environment) as second:
        first.ok(BEGIN)
        cell = first.ok(GOES_ON.format(go=go))
        assert "Cell In[3]" in cell.text
        # it has processes of its own, and no session
        assert "No session" in first.ok("%accelerate status").text
        assert ", detached" in first.ok("%accelerate runs").text
        first.kill()
        second.ok("import accelerate_nb, pathlib\nrun = accelerate_nb.attach()")
        assert second.value("run.done") is False
        second.ok(f"pathlib.Path({go!r}).touch()")
        second.ok("run.wait()")
        assert second.value("run.logs(1).splitlines()") == ["1 one 4", "1 two 4", "goes on"]
        # an error has the cell's own lines
        second.ok("%load_ext accelerate_nb")
        second.ok("%%accelerate -n 2 --detach\nx = 1\nmissing + x")
        error = second.run("accelerate_nb.attach(panel=False).wait()").failure
        assert error.name == "NameError"
        assert ", line 3, in <module>" in error.text
        assert "Cell In[" in error.text
        assert "interactiveshell" not in error.text
