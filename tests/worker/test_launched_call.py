"""Launchers in processes that another launcher has started: what a script exported from a notebook does under torchrun."""

import json
import os
import subprocess
from itertools import pairwise
from typing import Any

import pytest

from accelerate_nb import launch, notebook_launcher
from accelerate_nb.errors import ConfigurationError
from tests.processes import TORCHRUN, python

pytestmark = pytest.mark.slow

HEAD = """
import json, os, sys, warnings
import torch
import torch.distributed as dist
from accelerate_nb import Accelerator, debug_launcher, launch, notebook_launcher

RANK, found = int(os.environ["RANK"]), {}

def finish():
    with open(os.path.join(sys.argv[1], f"{RANK}.json"), "w") as file:
        json.dump(found, file)
"""

CALLS = """
class Kept:
    def __init__(self, rank):
        self.rank = rank
    def __reduce__(self):
        raise TypeError("it stays")

def train(epochs, ends=True):
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(epochs):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), float(accelerator.process_index))).sum())
            optimizer.step()
            optimizer.zero_grad()
    weight = accelerator.unwrap_model(model).weight.detach().clone()
    everyone = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    facts = {
        "rank": accelerator.process_index, "pid": os.getpid(), "everyone": everyone, "weight": weight,
        "precision": accelerator.mixed_precision, "steps": accelerator.gradient_accumulation_steps,
        "device": accelerator.device.type,
    }
    if ends:
        accelerator.end_training()
    return facts

def theirs():
    from accelerate import Accelerator
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    return [accelerator.num_processes, accelerator.mixed_precision, accelerator.gather(torch.tensor([RANK])).tolist()]

def plain():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

# what each call says is said for it alone, and no call finds anything of another
several = [
    notebook_launcher(train, (2, ends), num_processes=2, results="all", mixed_precision=precision, gradient_accumulation_steps=steps)
    for ends, precision, steps in [(True, "bf16", 1), (False, "no", 2), (False, "bf16", 3), (True, "no", 4), (False, "no", 1)]
]
found["several"] = [[{**one, "weight": one["weight"].tolist()} for one in each] for each in several]
found["leftover"] = [dist.is_initialized(), "ACCELERATE_MIXED_PRECISION" in os.environ]
found["theirs"] = [notebook_launcher(theirs, mixed_precision="bf16"), notebook_launcher(theirs, mixed_precision="no")]
found["plain"] = [notebook_launcher(plain), notebook_launcher(plain)]

def ends_group():
    total = plain()
    dist.destroy_process_group()
    return total

found["ended"] = [notebook_launcher(ends_group), notebook_launcher(ends_group, results="all")]
found["main"] = notebook_launcher(lambda: {"rank": RANK, "tensor": torch.ones(2, requires_grad=True) * 2}, num_processes=2)
found["main"]["tensor"] = [found["main"]["tensor"].tolist(), found["main"]["tensor"].requires_grad]
found["large"] = notebook_launcher(lambda: torch.full((3_000_000,), float(RANK)), results="all")[1].sum().item()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found["kept"] = [notebook_launcher(lambda: Kept(RANK)), notebook_launcher(lambda: Kept(RANK) if RANK else 3, results="all")]
    found["kept warnings"] = [str(one.message) for one in caught]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        notebook_launcher(lambda: None, num_processes=3, num_nodes=2, timeout=5, max_restarts=2, start_method="fork")
    found["size notices"] = [str(one.message) for one in caught]
found["debug"], found["debug pid"] = debug_launcher(lambda: [os.environ["ACCELERATE_USE_CPU"], os.getpid()], num_processes=4)
found["pid"] = os.getpid()
found["exit"] = notebook_launcher(lambda: sys.exit(0))
torch.manual_seed(RANK)
before = torch.get_rng_state()
notebook_launcher(lambda: torch.rand(3))
found["random"] = torch.equal(torch.get_rng_state(), before)
found["nested"] = notebook_launcher(lambda: [notebook_launcher(train, (1,))["rank"], notebook_launcher(plain)], results="all")
"""

BEFORE = """
accelerator = Accelerator(gradient_accumulation_steps=5)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.arange(8.0).view(4, 2), batch_size=1)
torch.nn.init.ones_(model.weight)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

def step():
    for batch in loader:
        accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.detach().tolist()

def train():
    inner = Accelerator()
    return [inner.mixed_precision, inner.num_processes, dist.is_initialized()]

found["around calls"], found["around weights"] = [], [step()]
for _ in range(2):
    found["around calls"].append(notebook_launcher(train, num_processes=2))
    found["around weights"].append(step())
found["around gathered"] = accelerator.gather(torch.tensor([RANK])).tolist()

def fails():
    raise KeyError(f"of rank {RANK}")

try:
    notebook_launcher(fails)
except BaseException as error:
    found["around failed"] = [type(error).__name__, str(error)]
found["around weights"].append(step())
# a function that ends the world of the script
found["around ended"] = [notebook_launcher(accelerator.end_training), dist.is_initialized(), Accelerator().num_processes]
Accelerator().end_training()

# a group that the script has made by itself; under torchrun only one can be made at torchrun's own store, and that is below
dist.init_process_group("gloo", store=dist.FileStore(os.path.join(sys.argv[1], "group"), 2), rank=RANK, world_size=2)
found["around plain"] = notebook_launcher(lambda: RANK + dist.get_world_size())
total = torch.ones(1)
dist.all_reduce(total)
found["around total"] = total.item()
dist.destroy_process_group()

# Hugging Face's own, made by the script
from accelerate import Accelerator as Theirs

outer = Theirs(mixed_precision="no")
found["theirs inside"] = notebook_launcher(theirs)
found["theirs after"] = [outer.mixed_precision, outer.num_processes, outer.gather(torch.tensor([RANK])).tolist()]
outer.end_training()
"""

RUNS = """
def train(epochs):
    accelerator = Accelerator()
    accelerator.init_trackers("it")
    for step in range(epochs):
        accelerator.log({"loss": 10.0 * RANK + step}, step=step)
        print(f"rank {RANK}: step {step}")
    print("to stderr", file=sys.stderr)
    accelerator.end_training()
    return RANK

run = launch(train, args=(3,), num_processes=2, cpu=True)
found["run done"], found["run wait"], found["run results"] = run.done, run.wait(), run.results
found["run state"] = run.view.state
found["run losses"] = [[one.value for one in run.view.rank(rank).series["loss"]] for rank in (0, 1)]
found["run logs"] = [sorted(run.logs(rank).splitlines()) for rank in (0, 1)]
found["run states"] = [run.view.rank(rank).state for rank in (0, 1)]
found["run files"] = sorted(one.name for one in run.folder.iterdir())

import asyncio

async def awaited():
    return await launch(train, args=(1,), results="all")
found["run awaited"] = asyncio.run(awaited())

def fails():
    raise KeyError(f"of rank {RANK}")

run = launch(fails)
try:
    run.wait()
except KeyError as error:
    found["run failed"] = [type(error).__name__, error.rank, str(error).splitlines()[0]]
"""


LAST = """
# a failure of one rank that is caught, where the other has none
try:
    notebook_launcher(lambda: [0][RANK])
    notebook_launcher(lambda: None)
except IndexError:
    try:
        notebook_launcher(lambda: None)
    except Exception as error:
        found["calls"] = [type(error).__name__, str(error)]
except Exception as error:
    found["calls"] = [type(error).__name__, str(error)]

def fails():
    if RANK == 1:
        raise ZeroDivisionError("of rank 1")
    plain()

finish()
notebook_launcher(fails)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """One script under torchrun, on two processes of the CPU; and what each has found, in the order of ranks."""
    folder = tmp_path_factory.mktemp("script")
    file = folder / "script.py"
    file.write_text(HEAD + CALLS + RUNS + BEFORE + LAST)
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
    done = python(*TORCHRUN, file, folder, **environment)
    files = [folder / f"{rank}.json" for rank in (0, 1)]
    assert all(item.exists() for item in files), done.stderr
    return done, [json.loads(item.read_text()) for item in files]


@pytest.fixture(scope="module")
def found(script: tuple[Any, list[Any]]) -> list[Any]:
    """What each rank has found."""
    return script[1]


def both(found: list[Any], name: str) -> Any:
    """What both ranks have found alike."""
    assert found[0][name] == found[1][name]
    return found[0][name]


# --------------------------------------------------------------------------------------------------------------- calls


# What both ranks find, by the names under which the script keeps it.
FOUND = {
    "every process gets rank 0's result, its tensors on the CPU": {"main": {"rank": 0, "tensor": [[2.0, 2.0], False]}},
    "a call leaves nothing behind": {"leftover": [False, False]},
    "Accelerate's own Accelerator begins anew in each call": {"theirs": [[2, "bf16", [0, 1]], [2, "no", [0, 1]]]},
    "Accelerate's own Accelerator of the script is the function's": {
        "theirs inside": [2, "no", [0, 1]],
        "theirs after": ["no", 2, [0, 1]],
    },
    "groups that a function makes by itself meet in each call": {"plain": [2.0, 2.0]},
    "large results come whole": {"large": 3_000_000.0},
    "a function that ends its group has a result, too": {"ended": [2.0, [2.0, 2.0]]},
    "the debug launcher starts no processes inside of processes": {"debug": "true"},
    "an exit in good order is a return": {"exit": None},
    "a function draws no random numbers of the script's": {"random": True},
    "a launcher inside of a launched function calls its function, too": {"nested": [[0, 2.0], [0, 2.0]]},
    "a function shares the script's Accelerator": {"around calls": [["no", 2, True]] * 2},
    "a group that the script made goes on after a call": {"around plain": 2, "around total": 2.0},
    "a function may end the script's own group": {"around ended": [None, False, 2]},
    "a launch gives a run that is over": {
        "run done": True,
        "run state": "finished",
        "run wait": 0,
        "run results": [0, 1],
        "run awaited": [0, 1],
    },
}


@pytest.mark.parametrize("promise", FOUND)
def test_both_ranks_find_alike_that(promise, found):
    assert {name: both(found, name) for name in FOUND[promise]} == FOUND[promise]


def test_each_of_several_calls_has_its_settings_and_ranks_that_train_together_in_the_processes_that_are_there(found):
    calls = both(found, "several")
    for entry in calls:
        assert [item["rank"] for item in entry] == [0, 1]
        assert len({item["pid"] for item in entry}) == 2
        assert all(item["everyone"] == [0, 1] for item in entry)
        assert entry[0]["weight"] == entry[1]["weight"]
    settings = [(item["precision"], item["steps"], item["device"]) for item, _ in calls]
    assert settings == [("bf16", 1, "cpu"), ("no", 2, "cpu"), ("bf16", 3, "cpu"), ("no", 4, "cpu"), ("no", 1, "cpu")]
    assert found[0]["debug pid"] == found[0]["pid"] == calls[0][0]["pid"]


def test_a_result_that_cant_be_pickled_is_none_on_every_process_with_a_warning_on_the_main_one(found):
    assert both(found, "kept") == [None, [3, None]]
    assert [len(item["kept warnings"]) for item in found] == [2, 0]
    assert "The result of the function on rank 0 stays in its process: result is a Kept" in found[0]["kept warnings"][0]


def test_another_number_of_processes_is_reported_once(found):
    assert [len(item["size notices"]) for item in found] == [1, 0]
    assert "num_processes=3" in found[0]["size notices"][0]
    assert "runs on these 2" in found[0]["size notices"][0]


# -------------------------------------------------------------------------------------------------- around the calls


def test_what_the_script_has_joined_and_prepared_goes_on_after_calls(found):
    weights = both(found, "around weights")
    # two batches of each rank, whose gradients are averaged: every epoch moves the weights by as much
    moved = [[a - b for a, b in zip(item[0], other[0], strict=True)] for item, other in pairwise(weights)]
    assert moved == [pytest.approx(moved[0], rel=1e-4)] * 3
    assert all(moved[0])
    assert both(found, "around gathered") == [0, 1]


def test_each_rank_raises_its_own_exception(found):
    assert [item["around failed"] for item in found] == [["KeyError", f"'of rank {rank}'"] for rank in (0, 1)]


def test_processes_that_have_made_different_numbers_of_calls_get_no_result_of_another_call(found):
    error_name, message = both(found, "calls")
    assert error_name == "OperationError"
    assert "rank 0" in message
    assert "Make each call in all processes" in message


def test_a_failure_that_nobody_catches_ends_the_script_with_its_traceback(script):
    done = script[0]
    assert done.returncode != 0
    assert "ZeroDivisionError: of rank 1" in done.stderr
    assert 'raise ZeroDivisionError("of rank 1")' in done.stderr


# ---------------------------------------------------------------------------------------------------------------- runs


def test_every_process_knows_what_each_rank_logged_and_wrote(found, script):
    assert both(found, "run losses") == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
    lines = [[f"rank {rank}: step {step}" for step in range(3)] for rank in (0, 1)]
    assert both(found, "run logs") == [sorted([*item, "to stderr"]) for item in lines]
    assert both(found, "run states") == ["finished", "finished"]
    assert {"events.jsonl", "rank_0.log", "rank_1.log", "status.json"} <= set(found[1]["run files"])
    # it is printed where the process prints, too
    assert script[0].stdout.count("rank 1: step 2") == 1
    assert "to stderr" in script[0].stderr


def test_a_run_that_has_failed_raises_where_it_is_waited_for(found):
    assert [item["run failed"] for item in found] == [
        ["KeyError", rank, f"rank {rank} stopped with KeyError: 'of rank {rank}'"] for rank in (0, 1)
    ]


# -------------------------------------------------------------------------------------------------------- one process


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only one that a launcher has started."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "ACCELERATE_USE_CPU": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("alone")
def test_one_process_alone_gets_its_own_value():
    value_of_call = object()
    assert notebook_launcher(lambda: value_of_call, num_processes=1) is value_of_call
    assert notebook_launcher(lambda: value_of_call, num_processes=1, results="all") == [value_of_call]
    assert launch(lambda: value_of_call).wait() is value_of_call
    with pytest.raises(KeyError):
        notebook_launcher({}.__getitem__, args=("nothing",))


@pytest.mark.usefixtures("alone")
def test_what_only_a_launcher_decides_is_no_error_there(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("num_machines: 2\nmixed_precision: bf16\n")
    assert notebook_launcher(os.getenv, args=("ACCELERATE_MIXED_PRECISION",), config_file=file) == "bf16"
    with pytest.raises(ConfigurationError, match="Did you mean num_processes"):
        notebook_launcher(os.getpid, num_proceses=2)
