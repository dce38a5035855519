"""The small functions give the same answers as Hugging Face Accelerate's."""

import collections
import copy
import enum
import functools
import os
import socket
from collections.abc import Callable, Iterator
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import accelerate.utils as theirs
import numpy as np
import pytest
import torch
from accelerate.utils import constants as their_constants, dataclasses as their_kinds, environment, imports
from torch import nn

import accelerate_nb.utils as ours
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.runtime.compat import packages
from accelerate_nb.runtime.compat.env_vars import check_cuda_fp8_capability, near
from accelerate_nb.utils import constants, dataclasses, environment as our_environment, imports as our_imports
from accelerate_nb.utils.other import clean_state_dict_for_safetensors, get_free_port
from tests.peers import Peer, under_both
from tests.processes import python

AVAILABLE = sorted(name for name in dir(imports) if name.startswith("is_") and name.endswith("_available"))


def answer(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns, or the built-in kind of what it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        error_classes = [error_class for error_class in type(error).__mro__ if error_class.__module__ == "builtins"]
        return f"raises {error_classes[0].__name__}"


class Named:
    __name__ = "an instance's own name"


TEXTS = ["y", "YES", "t", "True", "on", "1", "n", "No", "f", "FALSE", "off", "0", "", "2", "maybe", "none"]
VERSIONS = list(product([">", ">=", "==", "!=", "<=", "<", "=>", ""], ["1.0", "2.9.0", "99", "2.13.0", "2.13.0.dev1"]))
LAYER = nn.Linear(2, 3)
# The arguments of each function of the utilities, and the variables of its process where it reads some.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "str_to_bool": list(product(TEXTS, [False, True])),
    "get_int_from_env": [(["A", "B"], 7)],
    "parse_flag_from_env": [("SOME_FLAG", False), ("SOME_FLAG", True)],
    "parse_choice_from_env": [("SOME_FLAG", False), ("SOME_FLAG", True)],
    "launch.env_var_path_add": [("SOME_PATHS", Path("/c"))],
    "environment.convert_dict_to_env_variables": [
        *((given,) for given in ({"A": "1", "B": "2"}, {"A": ""}, {"": "1"}, {"A": "a b"}, {})),
        *((given,) for given in ({"A": "x;y", "B": "ok"}, {"A<": "1", "C": "\n"})),
    ],
    "are_libraries_initialized": [("torch", "no_such_package", "sys")],
    "get_cpu_distributed_information": [()],
    "convert_bytes": [(size,) for size in (0, 1, 1023, 1023.996, 1024, 1536, 10**6, 5 * 2**30, 3.5 * 2**40, 2**62, -5)],
    "get_pretty_name": [
        *((thing,) for thing in (int, 3, len, nn.Linear, LAYER, Named, Named(), os, lambda: 0)),
        *((thing,) for thing in (functools.partial(print), None, "text", Path.name)),
    ],
    "recursive_getattr": [
        (LAYER, f"weight{path}") for path in ("", ".shape", ".grad.shape", ".nothing", ".data.dtype")
    ],
    "compare_versions": [*(("torch", *call) for call in VERSIONS), ("no-such-package", ">", "1")],
    "is_torch_version": VERSIONS,
    **{f"imports.{name}": [()] for name in AVAILABLE},
    **{f"imports.is_{name}_available": [(), ("1.0",), ("1.12",), ("99.0",)] for name in ("numpy", "mps", "bnb")},
    "is_rich_available": [()],
    "get_current_device_type": [()],
    "memory.should_reduce_batch_size": [
        (RuntimeError("CUDA out of memory. Tried"),),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),),
        (RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed"),),
        (RuntimeError("CUDA out of memory. Tried", 2),),
        (RuntimeError("shapes cannot be multiplied"),),
        (KeyError(" out of memory."),),
    ],
}
FLAGS = [{}, {"SOME_FLAG": "1"}, {"SOME_FLAG": "no"}, {"SOME_FLAG": "yes"}, {"SOME_FLAG": "what"}]
VARIABLES: dict[str, list[dict[str, str]]] = {
    "get_int_from_env": [{}, {"A": "3"}, {"A": "-2", "B": "5"}, {"A": "0", "B": "1"}, {"B": "x"}],
    "parse_flag_from_env": FLAGS,
    "parse_choice_from_env": FLAGS,
    "launch.env_var_path_add": [{}, *({"SOME_PATHS": held} for held in ("", "/a", "/a::/b", ":"))],
    "get_cpu_distributed_information": [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "8", "RANK": "-1"},
    ],
    "is_rich_available": [{}, {"ACCELERATE_ENABLE_RICH": "1"}, {"ACCELERATE_ENABLE_RICH": "no"}],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_answers_as_accelerates_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, args in product(VARIABLES.get(name, [{}]), CALLS[name]):
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            mine, expected = (answer(attrgetter(name)(package), *args) for package in (ours, theirs))
        if name == "get_cpu_distributed_information":
            mine, expected = vars(mine), vars(expected)
        if name.startswith("imports."):
            expected = bool(expected)
        assert (mine, type(mine)) == (expected, type(expected)), (variables, args)


def test_dictionaries_are_merged_into_the_second() -> None:
    for source, destination in (
        ({}, {}),
        ({"a": 1}, {"a": 2, "b": 3}),
        ({"a": {"x": 1, "y": {"z": 2}}}, {"a": {"y": {"w": 3}, "v": 4}}),
        ({"a": {"x": 1}}, {}),
        ({"a": 1}, {"a": {"x": 1}}),
        ({"a": {}}, {"a": 5}),
        ({"a": [1]}, {"a": [2]}),
    ):
        mine, expected = copy.deepcopy(destination), copy.deepcopy(destination)
        assert ours.merge_dicts(source, mine) is mine
        assert mine == theirs.merge_dicts(source, expected)


def snapshots(peer: Any) -> Iterator[tuple[str | None, ...]]:
    """What three variables say before, in and after blocks that change them, also where a block fails."""

    def now() -> tuple[str | None, ...]:
        return tuple(os.environ.get(name) for name in ("KEPT", "CHANGED", "NEW"))

    yield now()
    with peer.patch_environment(changed=2, New="x"):
        yield now()
        with peer.clear_environment():
            yield now()
            os.environ["NEW"] = "inside"
        yield now()
        with peer.patch_environment(NEW="deeper"):
            del os.environ["NEW"]
    yield now()
    with pytest.raises(KeyError), peer.patch_environment(KEPT="failing"):
        raise KeyError
    yield now()


def test_variables_are_as_before_after_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEPT", "CHANGED"):
        monkeypatch.setenv(name, "1")
    assert list(snapshots(ours)) == list(snapshots(theirs))


def purged(peer: Any) -> list[str | None]:
    """What is left of variables that a function, and a class's test methods, set."""

    @peer.purge_accelerate_environment
    def setting() -> str:
        os.environ.update(ACCELERATE_A="new", ACCELERATE_KEPT="changed", OTHER="stays")
        return "returned"

    @peer.purge_accelerate_environment
    class Tests:
        def test_one(self) -> None:
            os.environ["ACCELERATE_ONE"] = "1"

        def other(self) -> None:
            os.environ["ACCELERATE_TWO"] = "2"

    class More(Tests):
        def test_three(self) -> None:
            os.environ["ACCELERATE_THREE"] = "3"

    returned = [setting()]
    Tests().test_one()
    More().test_one()
    More().test_three()
    Tests().other()
    names = ("A", "KEPT", "ONE", "TWO", "THREE")
    left = [os.environ.get(f"ACCELERATE_{name}") for name in names] + [os.environ.pop("OTHER", None)]
    os.environ.pop("ACCELERATE_TWO", None)
    return returned + left


def test_variables_of_accelerate_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "as it was")
    assert purged(ours) == purged(theirs) == ["returned", None, "as it was", None, "2", None, "stays"]


def test_a_package_that_is_installed_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not packages.is_installed("made_up_package")
    (tmp_path / "made_up_package").mkdir()
    assert not packages.is_installed("made_up_package")  # a folder of that name is no installed package
    (tmp_path / "made_up_package" / "__init__.py").touch()
    information = tmp_path / "made_up_package-1.5.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up-package\nVersion: 1.5\n")
    assert packages.is_installed("made_up_package", "of-another-name", "made-up-package")
    assert packages.is_installed("made_up_package", "made-up-package", at_least="1.5")
    assert not packages.is_installed("made_up_package", "made-up-package", at_least="1.6")
    assert not packages.is_installed("made_up_package", "made-up-package", below="1.5")


def test_torchao_and_one_device_of_xla_alone_are_requested() -> None:
    with pytest.raises(AccelerateNbError):
        packages.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)
    if packages.is_torchao_available():
        pytest.skip("torchao is installed here")
    for package in (imports, our_imports):
        with pytest.raises(ImportError, match="torchao"):
            package.torchao_required(lambda: None)()


@pytest.mark.parametrize(
    ("names", "driver", "allowed"),
    [
        (["NVIDIA A100"] * 2, "470.1", True),
        (["NVIDIA GeForce RTX 4090"] * 2, "535.10", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"], "535.10", True),
        (["NVIDIA A100", "NVIDIA GeForce RTX 4080"], "535.10", False),
    ],
)
def test_gpus_that_cannot_reach_each_other_are_known(
    names: list[str], driver: str, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a stand-in for the driver's tool
    tool = tmp_path / "nvidia-smi"
    lines = ["#!/bin/sh", 'case "$1" in']
    lines += ["--query-gpu=name)", *(f"echo '{name}'" for name in names), ";;"]
    lines += ["--query-gpu=count,name)", *(f"echo '{len(names)}, {name}'" for name in names), ";;"]
    lines += ["--query-gpu=driver_version)", *(f"echo '{driver}'" for _ in names), ";;"]
    lines += ["--query-gpu=compute_cap)", *("echo 8.9" for _ in names), ";;", "*) exit 2;;", "esac"]
    tool.write_text("\n".join(lines) + "\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert ours.get_gpu_info() == theirs.get_gpu_info() == (names, len(names))
    assert our_environment.get_driver_version() == environment.get_driver_version() == driver
    assert ours.check_cuda_p2p_ib_support() is theirs.check_cuda_p2p_ib_support() is allowed
    assert check_cuda_fp8_capability.__wrapped__() is True


def test_without_a_driver_nothing_is_known_against_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert answer(ours.get_gpu_info) == answer(theirs.get_gpu_info) == "raises FileNotFoundError"
    assert ours.check_cuda_p2p_ib_support() is theirs.check_cuda_p2p_ib_support() is True


def test_the_kernel_reports_which_cores_are_near(tmp_path: Path) -> None:
    assert near(tmp_path) == set()
    for text, cores in (("0-3\n", {0, 1, 2, 3}), ("0,2-3,8", {0, 2, 3, 8}), ("\n", set())):
        (tmp_path / "local_cpulist").write_text(text)
        assert near(tmp_path) == cores


def test_a_new_kernel_is_not_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.5.1-generic")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    ours.check_os_kernel()
    assert not caplog.records
    monkeypatch.setattr("platform.release", lambda: "5.4.0-generic")
    ours.check_os_kernel()
    assert "5.4.0" in caplog.text


def test_a_port_is_in_use_while_someone_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert ours.is_port_in_use(port) is theirs.is_port_in_use(port) is True
    assert ours.is_port_in_use(port) is theirs.is_port_in_use(port) is False
    with socket.socket() as listener:
        listener.bind(("", get_free_port()))


def test_modules_are_listed_from_the_inside() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.ModuleDict({"a": nn.Tanh()}))
    for named in (False, True):
        mine, expected = (item.get_module_children_bottom_up(model, named) for item in (ours, theirs))
        assert mine == expected
    for name in ("Linear", "ReLU", "Sequential", "Nothing"):
        found = [item.get_module_class_from_name(model, name) for item in (dataclasses, their_kinds)]
        assert found[0] is found[1]
    assert ours.model_has_dtensor(model) is theirs.model_has_dtensor(model) is False


@pytest.mark.parametrize(
    "attributes",
    [{}, {"tp_size": 4}, {"config": {"distributed_config": {"tp_size": 2}}}, {"config": {"distributed_config": None}}],
)
def test_a_model_knows_over_how_many_processes_it_is_split(attributes: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    for name, value in attributes.items():
        setattr(model, name, type("Config", (), value)() if isinstance(value, dict) else value)
    assert ours.get_model_tp_size(model) == theirs.get_model_tp_size(model)


def test_what_was_saved_is_loaded_without_running_code(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    torch.save({"array": np.arange(3, dtype=np.uint32), "tensor": torch.ones(2), "number": 3}, path)
    mine, expected = ours.load(path), theirs.load(path)
    assert mine["array"].tolist() == expected["array"].tolist() == [0, 1, 2]
    torch.save({"an object": Named()}, path)
    for load in (ours.load, theirs.load):
        with pytest.raises(Exception, match="Weights only load failed"):
            load(path)
    assert isinstance(ours.load(path, weights_only=False)["an object"], Named)
    assert ours.load(path, "cpu", weights_only=False).keys() == {"an object"}


@pytest.mark.parametrize("given", [{"epoch": 3}, [torch.ones(1)]], ids=repr)
def test_what_safetensors_does_not_take_is_named(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="but received"):
        ours.save(given, tmp_path / "saved.safetensors", safe_serialization=True)


def test_shared_weights_are_kept_once() -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    state = collections.OrderedDict(a=tied, b=tied, c=tied.t(), note="text", d=torch.zeros(2))
    kept = clean_state_dict_for_safetensors(dict(state))
    assert list(kept) == ["a", "c", "note", "d"]
    assert kept["note"] == "text"
    assert torch.equal(kept["c"], tied.t())
    assert all(value.is_contiguous() for value in kept.values() if isinstance(value, torch.Tensor))


def test_the_default_file_is_the_same_where_launchers_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate_nb.config.hf_files import find, read

    for precision in ("no", "FP16", "bf16"):
        first, second = (tmp_path / precision / name / "default_config.yaml" for name in ("ours", "theirs"))
        for path, package in ((first, ours), (second, theirs)):
            assert package.write_basic_config(precision, str(path)) == path
            assert package.write_basic_config(precision, str(path)) is False
        assert first.read_text() == second.read_text()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = ours.write_basic_config("bf16")
    assert find({"HF_HOME": str(tmp_path)}) == path
    assert read(Path(str(path)))["mixed_precision"] == "bf16"
    assert answer(ours.write_basic_config, "fp3", tmp_path / "new") == "raises ValueError"


def test_constants_and_kinds_have_the_same_values() -> None:
    names = [name for name in dir(constants) if name.isupper()]
    assert attrgetter(*names)(constants) == attrgetter(*names)(their_constants)
    kinds = {name: kind for name, kind in vars(their_kinds).items() if isinstance(kind, enum.EnumMeta) and list(kind)}
    shared = {name: kind for name, kind in kinds.items() if hasattr(dataclasses, name)}
    known = {"DistributedType", "PrecisionType", "RNGType", "LoggerType", "CustomDtype", "ComputeEnvironment"}
    assert known <= set(shared)
    for name, their_kind in shared.items():
        mine = {item.name: item.value for item in getattr(dataclasses, name)}
        if name == "DynamoBackend":
            del mine["OPENXLA"]  # torch_xla's compiler of today, in place of two that torch has no more
        assert mine == {item.name: item.value for item in their_kind}, name


@pytest.mark.parametrize("distributed_type", ["NO", "MULTI_CPU", "MULTI_GPU", "XLA"])
def test_a_process_of_another_launcher_knows_its_rank(distributed_type: str) -> None:
    seen: list[list[str | None]] = []

    def note(mark: str) -> None:
        seen.append([mark, *map(os.environ.get, ("LOCAL_RANK", "RANK", "FORK_LAUNCHED"))])

    for package in (theirs, ours):
        with package.clear_environment(), package.patch_environment(NPROC=2, NODE_RANK=3):
            package.PrepareForLaunch(note, distributed_type)(1, "called")
    assert seen[0] == seen[1]
    assert seen[0][0] == "called"


def asking(peer: Peer, folder: str) -> dict[str, Any]:
    """What an Accelerator on one process answers, and which private names others read of what it prepared."""
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import DataLoader

    seen: dict[str, Any] = {}
    file = Path(folder, peer.name)
    met = {"WORLD_SIZE": "1", "ACCELERATE_DEBUG_RDV_FILE": str(file)}
    with peer.door("utils").patch_environment(**met):
        prepare = peer.door("utils").PrepareForLaunch
        prepare(lambda: seen.update(group=torch.distributed.get_world_size()), debug=True)(0)
    torch.distributed.destroy_process_group()
    os.environ.pop("FORK_LAUNCHED", None)
    accelerator = peer.Accelerator(mixed_precision="bf16")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    prepared = accelerator.prepare(model, optimizer, DataLoader([1.0, 2.0]), schedule)
    seen["prepared"] = [hasattr(item, "_is_accelerate_prepared") for item in prepared]
    seen["lists"] = [*map(len, attrgetter("_models", "_optimizers", "_schedulers", "_dataloaders")(accelerator))]
    seen["forward"] = hasattr(accelerator.unwrap_model(prepared[0]), "_original_forward")
    seen["overflow"] = prepared[1]._is_overflow
    accelerator.gradient_state._set_sync_gradients(False)
    seen["sync"] = accelerator.sync_gradients
    seen["accumulation"] = dict(accelerator.gradient_state.plugin_kwargs)
    for name in (
        *("is_fsdp2", "is_composable_parallelism_enabled", "torch_device_mesh", "parallelism_config"),
        *("deepspeed_plugin", "device_placement", "should_save_model", "multi_device"),
    ):
        seen[name] = getattr(accelerator, name)
    for name in ("tensor", "data", "pipeline", "context"):
        seen[f"{name} rank"] = answer(getattr, accelerator, f"{name}_parallel_rank")
    seen["shard rank"] = answer(getattr, accelerator, "data_parallel_shard_rank")
    seen["adapter"] = accelerator.deepspeed_ulysses_dl_adapter("loader", None)
    with accelerator.maybe_context_parallel(buffers=[torch.ones(1)], buffer_seq_dims=[0]):
        seen["split"] = False

    @accelerator.maybe_context_parallel()
    def decorated() -> str:
        return "as Accelerate's"

    seen["decorated"] = [decorated(), decorated()]
    spread = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    seen["map"] = [accelerator.verify_device_map(spread)]
    spread[1].hf_device_map = {"a": 0, "b": "cpu"}
    seen["map"] += [accelerator.verify_device_map(spread)]
    accelerator.step = 5
    for name in ("fp8", "ao", "te", "msamp"):
        seen[f"{name} recipe"] = getattr(accelerator, f"{name}_recipe_handler")
    seen["flags"] = [accelerator.has_fp8_handler, accelerator.fp8_enabled, accelerator.delayed_fp8_autocast]
    seen["flags"] += [accelerator.has_lomo_optimizer]
    seen["cleared"] = [accelerator.clear(*prepared), accelerator.step]
    seen["cleared"] += [accelerator._models, accelerator._schedulers, accelerator._dataloaders]
    accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders = [], [], [], []
    accelerator._custom_objects = [prepared[0]]
    seen["assigned"] = [accelerator._models, len(accelerator._custom_objects), len(accelerator._dataloaders)]
    accelerator.prepare(DataLoader([1.0]))
    seen["assigned"] += [len(accelerator._dataloaders)]
    seen["copied"] = copy.deepcopy(accelerator) is accelerator
    state = accelerator.state
    seen["state"] = [state.fork_launched, state.is_fsdp2, answer(state.get_deepspeed_plugin, "a")]
    seen["state"] += [answer(state.select_deepspeed_plugin, "a"), bool(type(state)._shared_state)]
    type(state)._reset_state(reset_partial_state=True)
    seen["after"] = [bool(type(state)._shared_state), peer.door("state").is_initialized()]
    return seen


def test_an_accelerator_has_what_others_look_for(tmp_path: Path) -> None:
    both = under_both(asking, 1, str(tmp_path))
    for name, answered in both.theirs[0].items():
        assert (name, both.ours[0][name]) == (name, answered)


def attributes(peer: Peer) -> tuple[set[str], set[str]]:
    accelerator = peer.Accelerator(cpu=True)
    return {name for name in vars(accelerator) if not name.startswith("_")}, set(dir(accelerator))


def test_an_accelerator_has_all_public_attributes_of_accelerates() -> None:
    both = under_both(attributes, 1)
    assert both.theirs[0][0] - both.ours[0][1] == set()


@pytest.mark.slow
def test_nothing_is_looked_up_when_the_doors_are_imported() -> None:
    code = "import accelerate_nb.utils; from accelerate_nb.runtime.compat.packages import _found; print(_found.cache_info().misses)"
    assert python("-c", code, check=True).stdout.strip() == "0"
