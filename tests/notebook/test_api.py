"""The launchers keep Hugging Face's signatures, and run a function where and how the person said."""

import functools
import inspect
import os
import sys
from pathlib import Path

import accelerate
import pytest
import torch

import accelerate_nb
from accelerate_nb import (
    Accelerator,
    ConfigurationError,
    FullyShardedDataParallelPlugin,
    attach,
    debug_launcher,
    launch,
    notebook_launcher,
    runs,
)
from accelerate_nb.errors import AccelerateNbError, LaunchError
from accelerate_nb.reports.summary import RunFacts

VARIABLES = ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")


def launch_environment():
    """What a worker's environment says."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@pytest.mark.parametrize("name", ["notebook_launcher", "debug_launcher"])
def test_a_call_written_for_accelerate_means_the_same_here(name):
    theirs = inspect.signature(getattr(accelerate, name)).parameters.values()
    ours = list(inspect.signature(getattr(accelerate_nb, name)).parameters.values())
    for number, parameter in enumerate(theirs):
        our = ours[number]
        assert (our.name, our.kind, our.default) == (parameter.name, parameter.kind, parameter.default)
    assert all(our.kind in {our.KEYWORD_ONLY, our.VAR_KEYWORD} for our in ours[number + 1 :])


class Recorded:
    """A value that leaves a file where it is pickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        Path(self.folder, os.environ["RANK"]).touch()
        return str, ("brought back",)


def test_a_rank_whose_result_nobody_receives_does_not_send_it(tmp_path):
    def train(folder):
        return Recorded(folder)

    assert notebook_launcher(train, (str(tmp_path),), 2, cpu=True) == "brought back"
    assert (tmp_path / "0").exists()
    assert not (tmp_path / "1").exists()


def prepared_models(version):
    """A model of each kind of wrapper after a step, and the output that it has."""
    fsdp = version and FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=fsdp)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    weights = accelerator.get_state_dict(model)
    return {"model": model, "compiled": [torch.compile(model, backend="eager")], "weights": weights}


@pytest.mark.parametrize("version", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_prepared_model_comes_back_unwrapped_and_whole_on_the_cpu(version):
    result = notebook_launcher(prepared_models, (version,), 2, cpu=True)
    for model in (result["model"], *result["compiled"]):
        assert type(model) is torch.nn.Sequential
        assert "forward" not in vars(model)
        assert all(type(weight) is torch.nn.Parameter and weight.device.type == "cpu" for weight in model.parameters())
        torch.testing.assert_close(dict(model.state_dict()), result["weights"])
        model(torch.ones(1, 4)).sum().backward()


def test_an_accelerator_in_a_result_is_named():
    with pytest.warns(UserWarning, match=r"result\['accelerator'\] is an Accelerator"):
        assert notebook_launcher(lambda: {"loss": 0.1, "accelerator": Accelerator()}, num_processes=1, cpu=True) is None


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher, launch])
def test_an_async_function_is_refused_before_the_launch(launcher):
    async def train(rate):
        return rate

    async def steps():
        yield 1

    class Trainer:
        async def __call__(self):
            return 1

    for function in (train, functools.partial(train, 0.1), steps, Trainer(), functools.partial(Trainer())):
        with pytest.raises(ConfigurationError, match=r"(train|steps|Trainer) is an async function"):
            launcher(function, num_processes=2)


@pytest.mark.parametrize("launcher", [notebook_launcher, launch])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "ray"}, "Ray is not installed"),
        ({"engine": "nope"}, "engine was given as 'nope'"),
        ({"num_processes": 10**9}, "num_processes=1000000000 was requested"),
        ({"hosts": "nohost.invalid"}, "can't be reached"),
        ({"config_file": "none.yaml"}, "none.yaml"),
        ({"nope": 1}, "no setting 'nope'"),
    ],
)
def test_an_error_before_the_launch_shows_the_person_s_frames_alone(monkeypatch, launcher, settings, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AccelerateNbError, match=message) as caught:
        launcher(print, **settings)
    assert caught.value.__suppress_context__
    shown = [entry.frame for entry in caught.traceback if not entry.frame.f_locals.get("__tracebackhide__")]
    assert [frame.code.path for frame in shown] == [Path(__file__)]


def test_settings_reach_every_rank_whose_values_come_back_on_request_and_others_are_left_to_the_accelerator():
    def variables():
        return {name: value for name, value in os.environ.items() if name.startswith(("RANK", "FSDP_", "ACCELERATE_"))}

    settings = {"gradient_accumulation_steps": 4, "strategy": "fsdp"}
    found = notebook_launcher(variables, num_processes=2, cpu=True, results="all", **settings)
    assert [item["RANK"] for item in found] == ["0", "1"]
    for item in found:
        assert item["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
        assert (item["ACCELERATE_USE_FSDP"], item["FSDP_VERSION"]) == ("true", "2")
        assert not any(name.startswith("FSDP_") and name != "FSDP_VERSION" for name in item)
        assert "ACCELERATE_MIXED_PRECISION" not in item


def test_the_configuration_file_sets_what_the_call_does_not(default_file):
    default_file.write_text("num_processes: 2\nmixed_precision: bf16\nuse_cpu: true\n")
    found = notebook_launcher(launch_environment, results="all")
    assert [item["ACCELERATE_MIXED_PRECISION"] for item in found] == ["bf16", "bf16"]
    assert notebook_launcher(launch_environment, config_file="", num_processes=1)["WORLD_SIZE"] == "1"


def test_a_debug_launch_is_on_two_cpu_processes_whatever_the_file_sets(default_file):
    default_file.write_text("mixed_precision: bf16\nnum_processes: 3\n")
    assert debug_launcher(launch_environment) == {"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"}


def test_a_debug_launch_is_shown_in_the_way_that_the_environment_chooses(monkeypatch, capsys):
    debug_launcher(print, ("shown",))
    assert "shown" in capsys.readouterr().out
    monkeypatch.setenv("ACCELERATE_NB_PANEL", "off")
    debug_launcher(print, ("shown",))
    assert "shown" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [{"cpu": True, "num_processes": 1}, {"engine": "inline"}, {"cpu": True, "num_processes": 1, "detach": True}],
    ids=["workers", "inline", "detached"],
)
def test_a_run_has_its_name_and_tags_wherever_it_is_shown(tmp_path, settings):
    run = launch(wait_for, (str(tmp_path),), {"answer": 7}, name="lr 0.1 µ", tags=["paper", "bf16"], **settings)
    assert run.wait() == 7
    assert (run.name, run.tags) == ("lr 0.1 µ", ("paper", "bf16"))
    (kept,) = runs()
    assert (kept.name, kept.tags, kept.function) == ("lr 0.1 µ", ("paper", "bf16"), "wait_for")
    assert kept.arguments["answer"] == "7"
    assert kept.folder.name.endswith("_lr_0_1_µ")
    assert attach("lr 0.1 µ", panel=False).tags == ("paper", "bf16")
    assert RunFacts.of(run, "jupyter", background=False, can_act=True).message()["tags"] == ("paper", "bf16")


def test_a_run_without_a_name_is_shown_with_the_arguments_in_which_it_differs(tmp_path):
    for answer in (7, 8):
        run = launch(wait_for, (str(tmp_path),), {"answer": answer}, engine="inline")
    assert run.name == "wait_for"
    assert RunFacts.of(run, "jupyter", background=False, can_act=True).name == "wait_for answer=8"
    assert [kept.name for kept in runs()] == ["wait_for answer=8", "wait_for answer=7"]


def wait_for(path, *, answer):
    """Wait until a file is there."""
    import time

    until = time.monotonic() + 30
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.01)
    return answer


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_processes": 0}, ConfigurationError, "num_processes was given as 0"),
        ({"name": 3}, ConfigurationError, "name was given as 3, but name should be a text of 1 to 100"),
        ({"name": " "}, ConfigurationError, "name should be a text"),
        ({"name": "x" * 101}, ConfigurationError, "name should be a text of 1 to 100 printable characters"),
        ({"name": "a\x1b[31m"}, ConfigurationError, "name should be a text of 1 to 100 printable characters"),
        ({"name": "two\nlines"}, ConfigurationError, "name should be a text of 1 to 100 printable characters"),
        ({"tags": 3}, ConfigurationError, "tags was given as 3, but tags should be at most 20 texts"),
        ({"tags": ["a", 2]}, ConfigurationError, "tags should be at most 20 texts of 1 to 40"),
        ({"tags": ["a,b"]}, ConfigurationError, "without commas"),
        ({"tags": ["a\tb"]}, ConfigurationError, "printable"),
        ({"tags": ",".join(map(str, range(21)))}, ConfigurationError, "at most 20 texts"),
        ({"args": 3}, ConfigurationError, r"one argument needs a comma: args=\(x,\)"),
        ({"args": "abc"}, ConfigurationError, "args should hold the function's arguments"),
        ({"config_file": "/no/such/file.yaml"}, ConfigurationError, "does not exist"),
    ],
)
@pytest.mark.parametrize("launcher", [notebook_launcher, launch])
def test_a_wrong_call_is_reported_before_anything_starts(launcher, settings, error, message):
    with pytest.raises(error, match=message):
        launcher(launch_environment, **settings)


@pytest.mark.parametrize("launcher", [notebook_launcher, launch, debug_launcher])
def test_what_is_no_function_is_reported(launcher):
    with pytest.raises(ConfigurationError, match="without parentheses"):
        launcher(launch_environment())


def test_a_tpu_is_not_left_out_unnoticed(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(LaunchError, match=r"PJRT_DEVICE=TPU requests a TPU, but .* pass cpu=True"):
        notebook_launcher(launch_environment, num_processes=1)
    assert notebook_launcher(launch_environment, num_processes=1, cpu=True)["WORLD_SIZE"] == "1"


# --------------------------------------------------------------------------------------- in a process that was launched


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_a_launcher_inside_a_worker_calls_its_function_there(launcher):
    def outer():
        pids = notebook_launcher(os.getpid, num_processes=2, cpu=True, results="all")
        return launcher(launch_environment, num_processes=2)["RANK"], pids, os.getpid()

    ranks = notebook_launcher(outer, num_processes=2, cpu=True, results="all")
    assert [rank for rank, *_ in ranks] == ["0", "0"]
    assert [pids for _, pids, _ in ranks] == [[pid for *_, pid in ranks]] * 2


def test_a_launch_inside_a_worker_is_a_run_in_the_workers_that_are_there():
    def outer():
        run = launch(launch_environment, num_processes=2, cpu=True, name="inner", tags="a")
        return [result["RANK"] for result in run.results], run.wait()["RANK"], run.logs(1), run.name, run.tags

    found = notebook_launcher(outer, num_processes=2, cpu=True, results="all", name="outer")
    assert found == [(["0", "1"], "0", "", "inner", ("a",))] * 2
    assert {(run.name, run.tags) for run in runs()} == {("outer", ()), ("inner", ("a",))}
