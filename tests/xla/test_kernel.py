"""What a notebook's own process has done with torch_xla does not matter to a launch, or is told; nothing is woken by one."""

import json
import os

import pytest

from accelerate_nb.devices import xla
from tests.devices.test_xla import COLAB, KAGGLE
from tests.kernel.kernels import ROOT
from tests.processes import python

SETTINGS = 'config_file="", panel="off"'
# In the way of a supervisor alone: a thread that begins while torch_xla is loaded, after which it can't fork.
STARTS_A_THREAD = """
import sys, threading

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch_xla.runtime":
            threading.Thread(target=threading.Event().wait, daemon=True).start()

if "accelerate_nb.supervisor.main" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
"""
PLACE = """
import os, sys
from accelerate_nb import LaunchError, launch, notebook_launcher

def place():
    from accelerate_nb import Accelerator
    return str(Accelerator().device)
"""


def run(code, folder, **environment):
    """What a Python of its own prints as JSON; as a notebook's does, it starts its supervisor before it needs it."""
    (folder / "notebook.py").write_text(PLACE + code)
    variables = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "XDG_CACHE_HOME": str(folder), **environment}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PJRT_DEVICE", raising=False)
        done = python("notebook.py", folder=folder, limit=180, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_runtime_that_is_awake_on_the_cpu_keeps_no_launch_from_its_device_but_a_fork(tmp_path):
    code = f"""
import json, torch, torch_xla
here = torch.ones(2, device=torch_xla.device()) + 1
torch_xla.sync()
found = [notebook_launcher(place, num_processes=1, start_method=method, {SETTINGS}) for method in ("auto", "spawn")]
try:
    notebook_launcher(place, num_processes=1, start_method="fork", {SETTINGS})
except LaunchError as error:
    found.append(str(error))
found.append(notebook_launcher(place, num_processes=1, engine="inline", {SETTINGS}))
print(json.dumps([*found, here.tolist(), os.getpid()]))
"""
    supervised, spawned, forked, inline, here, pid = run(code, tmp_path, PJRT_DEVICE="CPU")
    assert (supervised, spawned, inline, here) == ("xla:0", "xla:0", "xla:0", [2.0, 2.0])
    assert forked.startswith("start_method='fork' was requested, but torch_xla's runtime is awake in this process")
    assert f"({pid})" in forked


@pytest.mark.slow
def test_a_launch_wakes_nothing_here_and_leaves_torch_xla_unloaded(tmp_path):
    code = f"""
import json
device = notebook_launcher(place, num_processes=1, engine="xla", {SETTINGS})
run = launch(place, num_processes=1, start_method="fork", engine="xla", {SETTINGS})
forked = run.wait()
print(json.dumps([device, forked, run.why, "torch_xla" in sys.modules, "PJRT_DEVICE" in os.environ]))
"""
    device, forked, why, is_loaded, is_in_environment = run(code, tmp_path)
    assert (device, forked) == ("xla:0", "xla:0")
    assert why.startswith("1 XLA CPU device, through torch_xla: there is no TPU; ")
    assert (is_loaded, is_in_environment) == (False, False)


@pytest.mark.slow
def test_a_supervisor_that_torch_xla_makes_unfit_is_replaced_by_one_without_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STARTS_A_THREAD)
    code = f"""
import json
from accelerate_nb.launching.engines import supervisor
found = [notebook_launcher(place, num_processes=1, {SETTINGS}) for _ in range(2)]
print(json.dumps([found, sorted(supervisor._warmth.get().unfit)]))
"""
    found, unfit = run(code, tmp_path, PJRT_DEVICE="CPU")
    assert found == ["xla:0", "xla:0"]
    assert unfit == ["torch_xla"]


# What stands between torch_xla and a chip is mocked here, as there is none: what its devices are is not asked. All that
# decides which chips a process has, and how processes find each other, is torch_xla's own.
TOPOLOGY = """
import json, os, sys, types
import torch_xla
from torch_xla import runtime
from torch_xla.core import xla_model
from accelerate_nb.devices import xla

torch_xla.device = lambda: None
xla_model.get_xla_supported_devices = lambda: []
xla_model.set_replication = lambda *_: None
runtime.addressable_runtime_device_count = lambda: 8
found = []
for variables, process, processes in json.loads(sys.argv[1]):
    os.environ.clear()
    os.environ.update(xla.for_workers({"PJRT_DEVICE": "TPU", "PJRT_DYNAMIC_PLUGINS": "1", **variables}))
    xla.wake(process, processes)
    found.append({name: os.environ[name] for name in sorted(os.environ) if name.startswith(("TPU_PROCESS", "TPU_VIS", "TPU_CHIPS_PER_P", "CLOUD"))})
print(json.dumps(found))
"""


def test_each_process_of_a_tpu_gets_its_chip_and_knows_the_others():
    v3 = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v3-8", "TPU_WORKER_ID": "0"}
    cases = [(KAGGLE, 3, 8), ({**v3, "TPU_PROCESS_ADDRESSES": "local"}, 1, 4), (COLAB, 0, 1)]
    done = python("-c", TOPOLOGY, json.dumps(cases))
    assert done.returncode == 0, done.stderr
    of_eight, of_four, alone = json.loads(done.stdout.splitlines()[-1])
    assert of_eight == {
        "CLOUD_TPU_TASK_ID": "3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{port}" for port in range(8476, 8484)),
        "TPU_PROCESS_BOUNDS": "2,4,1",
        "TPU_PROCESS_PORT": "8479",
        "TPU_VISIBLE_CHIPS": "3",
    }
    names = ("TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS", "TPU_PROCESS_PORT")
    assert [of_four[name] for name in names] == ["2,2,1", "1", "8477"]
    bounds = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
    assert alone == {**bounds, "TPU_VISIBLE_CHIPS": "0"}


def test_the_bus_is_read_as_torch_xla_reads_it_and_a_worker_has_the_variables_that_it_sets(on_xla, monkeypatch):
    # what a fresh Python says of torch_xla after importing it is the source of truth
    code = """
import json, os
before = dict(os.environ)
import torch_xla
from torch_xla._internal import tpu
added = {name: value for name, value in os.environ.items() if before.get(name) != value}
print(json.dumps([added, tpu.num_available_chips(), tpu._TPU_PCI_DEVICE_IDS]))
"""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    done = python("-c", code, check=True, PJRT_DEVICE="CPU")
    added, chips, numbers = json.loads(done.stdout.splitlines()[-1])
    assert len(xla.tpu_chips()) == chips
    # the last is no chip that anybody can have: "testing only"
    assert set(numbers) - set(xla._GENERATIONS) <= {"0x0056"}
    (found,) = on_xla(lambda: dict(os.environ))
    assert "--xla_cpu_multi_thread_eigen=true" in found["XLA_FLAGS"]
    assert {name: found.get(name) for name in added} == added
