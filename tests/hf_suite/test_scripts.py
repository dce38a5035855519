"""The test scripts that Hugging Face Accelerate ships in its package pass on this one."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.hf_suite.alias import SCRIPTS, install
from tests.processes import python
from tests.ranks import run_on_ranks

FOLDER = Path(__file__).resolve().parent
RUN_HERE = {
    "test_ops.py",
    "test_sync.py",
    "test_script.py",
    "test_ddp_comm_hook.py",
    "test_distributed_data_loop.py",
    "test_notebook.py",
    "external_deps/test_metrics.py",
}
NOT_RUN_HERE = {
    "test_cli.py": "prints how many accelerators there are, and checks nothing",
    "test_merge_weights.py": "shards a model with FSDP on GPUs",
    "external_deps/test_checkpointing.py": "downloads a data set and a model",
    "external_deps/test_performance.py": "downloads a data set and a model",
    "external_deps/test_peak_memory_usage.py": "downloads a data set and a model, and measures a GPU's memory",
    "external_deps/test_pippy.py": "runs a pipeline over GPUs",
    "external_deps/test_zero3_integration.py": "needs DeepSpeed",
    "external_deps/test_ds_multiple_model.py": "needs DeepSpeed",
    "external_deps/test_ds_alst_ulysses_sp.py": "needs DeepSpeed",
}


def test_each_of_their_scripts_is_run_or_has_a_reason_not_to_be() -> None:
    package = find_spec("accelerate")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "test_utils" / "scripts"
    scripts = {path.relative_to(folder).as_posix() for path in folder.rglob("test_*.py")}
    assert scripts <= RUN_HERE | set(NOT_RUN_HERE)


# Packages that a script imports, and that our calls do not lead it to use: they need not be installed.
UNUSED = {"external_deps.test_metrics": ("datasets", "evaluate")}


def run_script(name: str, calls: Callable[[Any], None], folder: str) -> None:
    """`calls(script)`, where `script` is a module of theirs, and what that imports of `accelerate` is ours."""
    install()
    for package in UNUSED.get(name, ()):
        if find_spec(package) is None:
            sys.modules[package] = MagicMock(__spec__=ModuleSpec(package, None))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(folder)  # some write files where they run
    with redirect_stdout(StringIO()):  # they tell of each step
        calls(import_module(f"{SCRIPTS}.scripts.{name}"))


def everything(script: Any) -> None:
    script.main()


def all_but_a_state_that_was_taken_away(script: Any) -> None:
    # the last of its parts wants an `Accelerator` to refuse to work once `AcceleratorState._reset_state()` was called; ours
    # keeps what it was told when it was made, and works on
    script.is_pytest_available = lambda: False
    script.main()
    script.AcceleratorState._reset_state()
    accelerator = script.Accelerator()
    script.AcceleratorState._reset_state()
    assert accelerator.prepare(torch.nn.Linear(1, 1))(torch.ones(1, 1)).shape == (1, 1)


class OnTheCpu(torch.nn.parallel.DistributedDataParallel):
    """Torch's own class, for a script that names a GPU."""

    def __init__(self, module: torch.nn.Module, device_ids: list[int], output_device: int) -> None:
        super().__init__(module)


def hooks_without_a_gpu(script: Any) -> None:
    torch.nn.parallel.DistributedDataParallel = OnTheCpu  # what it compares with; this package has the original
    hook_types = script.DDPCommunicationHookType
    pairs = product([hook_types.POWER_SGD, hook_types.BATCHED_POWER_SGD], [hook_types.NO, hook_types.FP16])
    for hook, wrapper, options in (
        (hook_types.NO, hook_types.NO, {}),
        (hook_types.FP16, hook_types.NO, {}),
        (hook_types.POWER_SGD, hook_types.NO, {"matrix_approximation_rank": 2}),
        *((hook, wrapper, {}) for hook, wrapper in pairs),
    ):
        # without bf16, which torch averages on CUDA and XPU only
        script.test_ddp_comm_hook(hook, wrapper, options)


def uneven_batches(script: Any) -> None:
    script.test_default_ensures_even_batch_sizes()
    script.test_can_disable_even_batches()
    script.test_can_join_uneven_inputs()
    script.test_join_can_override_even_batches()
    script.test_join_can_override_for_mixed_type_dataloaders()
    script.test_join_raises_warning_for_iterable_when_overriding_even_batches()


def every_sample_once(script: Any) -> None:
    accelerator = script.create_accelerator()
    torch.manual_seed(accelerator.process_index)
    dataset = script.DummyDataset()
    batches = script.BatchSampler(script.RandomSampler(dataset), batch_size=script.BATCH_SIZE, drop_last=False)
    for loader in (
        script.DataLoader(dataset, shuffle=False, batch_size=script.BATCH_SIZE),
        script.DataLoader(dataset, shuffle=True, batch_size=script.BATCH_SIZE, num_workers=1),
        script.DataLoader(dataset, batch_sampler=batches),
        script.DataLoader(dataset, sampler=batches, batch_size=None, collate_fn=script.default_collate),
    ):
        script.test_data_loader(loader, accelerator)


def stateful_loaders(script: Any) -> None:
    script.test_stateful_dataloader(script.create_accelerator())


def stateful_loaders_in_a_checkpoint(script: Any) -> None:
    folders = iter(["of an iterable", "of a map"])
    # it saves to another folder on each process; a checkpoint of this package is one folder for all of them
    script.tempfile.TemporaryDirectory = lambda: nullcontext(next(folders))
    script.test_stateful_dataloader_save_state(script.create_accelerator())


def metrics(script: Any) -> None:
    # all but `test_mrpc`, which downloads a data set and a model, and which the script itself runs on accelerators alone
    for split, dispatch in product([True, False], [True, False]):
        config = script.DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
        accelerator = script.Accelerator(dataloader_config=config)
        script.test_torch_metrics(accelerator, 99)
        accelerator.state._reset_state()
    script.test_torch_metrics(script.Accelerator(), 512)
    script.test_gather_for_metrics_drop_last()
    # it looks for complaints in Accelerate's logger; ours are warnings
    logging.getLogger("accelerate.accelerator")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.test_gather_for_metrics_with_iterable_dataset()
        script.test_gather_for_metrics_with_non_tensor_objects_iterable_dataset()


LOOP, SIZES = "test_distributed_data_loop", (1, 2)
needs_torchdata = pytest.mark.skipif(find_spec("torchdata") is None, reason="stateful loaders are torchdata's")


@pytest.mark.parametrize(
    ("name", "calls", "world_size"),
    [
        *(("test_ops", everything, size) for size in SIZES),
        *(("test_sync", everything, size) for size in SIZES),
        *(("test_script", all_but_a_state_that_was_taken_away, size) for size in SIZES),
        ("test_ddp_comm_hook", hooks_without_a_gpu, 2),
        (LOOP, uneven_batches, 2),  # where Accelerate itself hangs without a GPU
        (LOOP, every_sample_once, 2),
        pytest.param(LOOP, stateful_loaders, 2, marks=needs_torchdata),
        pytest.param(LOOP, stateful_loaders_in_a_checkpoint, 2, marks=needs_torchdata),
        *(("external_deps.test_metrics", metrics, size) for size in SIZES),
    ],
)
def test_a_script_of_theirs_passes(name: str, calls: Callable[[Any], None], world_size: int, tmp_path: Path) -> None:
    run_on_ranks(run_script, world_size, name, calls, str(tmp_path))


# Their function lets every rank take from the queue, and whoever takes last waits for one that has returned or still takes: where
# ranks are connected, as ours always are, it would depend on who comes first. So one takes, and the others wait for it.
NOTEBOOK = """
import os
import accelerate.test_utils.scripts.test_notebook as script

theirs = script.tough_nut_function

def one_takes(queue):
    theirs(queue) if os.environ["RANK"] == "0" else script.PartialState()

script.tough_nut_function = one_takes
script.main()
"""


def test_the_notebook_launcher(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(FOLDER / "everywhere"), os.environ["PYTHONPATH"]])
    environment = {"ACCELERATE_NUM_PROCESSES": "2", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths}
    done = python("-c", NOTEBOOK, folder=tmp_path, limit=100, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Test monitoring" in done.stdout
