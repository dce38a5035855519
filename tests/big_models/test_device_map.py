"""Sizes, device maps and memory are those that Accelerate finds."""

import itertools
import math
import sys

import accelerate.utils.modeling as theirs
import numpy as np
import pytest
import torch
from accelerate.utils import CustomDtype
from torch import nn

import accelerate_nb.utils.modeling as ours
from accelerate_nb.errors import ConfigurationError
from tests.big_models.models import Deep, Small, Tied, bert, empty, gpt2, seeded

MODELS = {
    "small": lambda: seeded(Small),
    "deep": lambda: seeded(Deep),
    "deeper": lambda: seeded(Deep, 8, 7),
    "tied": lambda: seeded(Tied),
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(tied=False),
    "bert": bert,
    "sequence": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 9), nn.ReLU())), nn.BatchNorm1d(9), nn.Linear(9, 2)
    ),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def block_classes(model) -> list[str]:
    return list(getattr(model, "_no_split_modules", None) or ["Block"])


def budgets(model) -> list[dict]:
    """Memory for devices, from too little for anything to more than enough."""
    whole = theirs.compute_module_sizes(model)[""]
    fractions = [0, 1 / 20, 1 / 7, 1 / 3, 1 / 2, 2 / 3, 1, 1.5, 3]
    found = [{0: int(whole * part), "cpu": 10 * whole} for part in fractions]
    found += [{0: int(whole * part), 1: int(whole * part), "cpu": int(whole * part)} for part in fractions]
    found += [{"cpu": int(whole * part)} for part in fractions]
    found += [{0: whole // 2, 1: whole // 3, 2: whole, "disk": whole}, {1: whole // 2, 0: "1KB", "cpu": "0.5KiB"}]
    return found


@pytest.mark.slow
def test_sizes_are_those_of_accelerate(model):
    dtypes = [{"dtype": dtype} for dtype in (torch.float16, "float16", CustomDtype.INT4)]
    for options in [{}, *dtypes, {"buffers_only": True}]:
        assert ours.compute_module_sizes(model, **options) == theirs.compute_module_sizes(model, **options)
    special = {"linear1.weight": torch.float64, "head.bias": "int8"}
    given = {"dtype": torch.bfloat16, "special_dtypes": special}
    assert ours.compute_module_sizes(model, **given) == theirs.compute_module_sizes(model, **given)
    assert ours.calculate_maximum_sizes(model) == theirs.calculate_maximum_sizes(model)
    assert ours.compute_module_total_buffer_size(model) == theirs.compute_module_total_buffer_size(model)
    sizes = theirs.compute_module_sizes(model)
    assert sorted(ours.get_module_leaves(sizes)) == sorted(theirs.get_module_leaves(sizes))
    parts = list(model.named_children())
    for classes in ([], block_classes(model)):
        assert ours.get_max_layer_size(parts, sizes, classes) == theirs.get_max_layer_size(parts, sizes, classes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*buffer")
def test_device_maps_are_those_of_accelerate(model):
    differing = []
    for budget in budgets(model):
        for options in [
            {},
            {"no_split_module_classes": block_classes(model)},
            {"clean_result": False, "no_split_module_classes": block_classes(model)},
            {"dtype": torch.float16},
            {"offload_buffers": True},
            {"fallback_allocation": True},
            {"fallback_allocation": True, "no_split_module_classes": block_classes(model)[0]},
        ]:
            wanted = inferred(theirs, model, budget, options)
            if wanted is None:
                continue  # Accelerate can't
            found = without_own_buffers(model, inferred(ours, model, budget, options), wanted)
            if found != wanted:
                differing.append((budget, options, found, wanted))
    assert not differing, f"{len(differing)} differ, the first: {differing[0]}"


def inferred(package, model, budget, options):
    try:
        return dict(package.infer_auto_device_map(model, max_memory=dict(budget), **options))
    except IndexError:
        return None


def without_own_buffers(model, found, wanted):
    """A map of ours as Accelerate makes it, which forgets the buffers of a module that was split."""
    forgotten = [name for name, _ in model.named_buffers() if name in found and name not in wanted]
    parts = tuple(f"{part}." for part in wanted if part)
    assert not forgotten or not all(f"{name}.".startswith(parts) for name in model.state_dict())
    return {name: device for name, device in found.items() if name not in forgotten}


@pytest.mark.filterwarnings("ignore:.*buffer")
def test_every_map_covers_the_model(model):
    for budget in budgets(model):
        for clean in (True, False):
            ours.check_device_map(model, ours.infer_auto_device_map(model, budget, clean_result=clean))


def test_a_module_that_is_split_keeps_its_own_buffers():
    model = seeded(Deep)
    sizes = ours.compute_module_sizes(model)
    budget = {0: sizes["gain"] + sizes["body.0.0"] - 10 + sizes["body.0.0.up"] * 2, "cpu": 10**6}
    found = ours.infer_auto_device_map(model, budget, clean_result=False)
    assert (found["body.0.1.scale"], found["body.0.1.up"], found["body.0.1.shift"]) == (0, "cpu", 0)
    ours.check_device_map(model, found)


def test_balanced_memory_is_that_of_accelerate(model):
    whole = theirs.compute_module_sizes(model)[""]
    for budget in [
        {0: whole, 1: whole, "cpu": whole},
        {0: 10 * whole, 1: 10 * whole, 2: 10 * whole},
        {0: whole // 4, 1: whole, 2: whole},
        {0: whole, "cpu": whole},
        {"cpu": whole},
        {0: 0, 1: "1GB", 2: 10**6},
    ]:
        for options in [
            {},
            {"low_zero": True},
            {"no_split_module_classes": block_classes(model)},
            {"dtype": "float16", "no_split_module_classes": block_classes(model)[0], "low_zero": True},
        ]:
            wanted = theirs.get_balanced_memory(model, dict(budget), **options)
            assert ours.get_balanced_memory(model, dict(budget), **options) == wanted, (budget, options)


def test_memory_is_read_and_ordered_as_accelerate_does_and_can_be_balanced_with_a_disk():
    wanted = theirs.get_balanced_memory(seeded(Small), {0: 1000, 1: 1000})  # with a disk it is a RuntimeError there
    assert ours.get_balanced_memory(seeded(Small), {0: 1000, 1: 1000, "disk": 10}) == {**wanted, "disk": 10}
    budget = {"cpu": "1GiB", 1: "2.5MB", 0: 10, "disk": "1Gb"}
    assert list(ours.get_max_memory(budget).items()) == list(theirs.get_max_memory(dict(budget)).items())
    assert budget["cpu"] == "1GiB"  # the caller's own stays as it is
    free = ours.get_max_memory()
    assert set(free) == set(theirs.get_max_memory())
    with pytest.raises(ConfigurationError, match="'gpu' is not recognized"):
        ours.get_max_memory({"gpu": 1})
    with pytest.raises(ValueError, match="not a size"):
        ours.get_max_memory({0: "many"})


def test_memory_may_be_a_fraction_of_a_byte_infinite_or_a_number_of_numpy():
    budget = {0: 0.9 * 2001, 1: np.int64(3000), "cpu": math.inf}
    assert ours.get_max_memory(budget) == {0: 1800, 1: 3000, "cpu": sys.maxsize}
    assert ours.infer_auto_device_map(seeded(Small), budget) == theirs.infer_auto_device_map(seeded(Small), budget)


def size_of(package, size):
    try:
        return package.convert_file_size_to_int(size)
    except ValueError:
        return "no size"


def test_devices_are_the_same_where_they_are_for_accelerate():
    devices = [torch.device(name) for name in ("cpu", "cpu:0", "meta", "cuda", "cuda:0", "cuda:1", "mps")]
    for first, second in itertools.product(devices, devices):
        found = ours.check_device_same(first, second)
        assert found == theirs.check_device_same(first, second), (first, second)


def test_sizes_and_bytes_of_a_type_are_those_of_accelerate():
    for size in ("1MiB", "5.0GB", "3KB", "8Mb", "1.5gib", 12, "5", "GB", "-1GB", -1, "5XB", "five GB"):
        assert size_of(ours, size) == size_of(theirs, size), size
    # complex32 has 8 there, and 4 in memory
    for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, "float16", *CustomDtype):
        assert ours.dtype_byte_size(dtype) == theirs.dtype_byte_size(dtype), dtype


def test_tied_parameters_are_found_and_tied_again(model):
    assert sorted(ours.find_tied_parameters(model)) == sorted(theirs.find_tied_parameters(model))
    tied = ours.find_tied_parameters(model)
    for group in tied:
        for name in group[1:]:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(torch.zeros_like(model.get_parameter(name))))
    assert ours.find_tied_parameters(model) == []
    ours.retie_parameters(model, tied)
    assert sorted(ours.find_tied_parameters(model)) == sorted(tied)


def test_a_model_that_declares_its_weights_tied_is_believed():
    for model in (gpt2(), gpt2(tied=False), bert(), seeded(Tied)):
        assert ours.check_tied_parameters_in_config(model) == theirs.check_tied_parameters_in_config(model)


def test_maps_of_an_empty_model_are_those_of_the_full_one():
    model = empty(gpt2)
    model.tie_weights()
    budget = {0: 9000, 1: 20000, "cpu": 10**6}
    assert ours.infer_auto_device_map(model, budget) == theirs.infer_auto_device_map(gpt2(), budget)


def test_a_device_map_is_cleaned_as_accelerate_does():
    for device_map in (
        {"a.b": 0, "a.c": 0, "d": 1},
        {"a.b": 0, "a.c": 1, "d.e.f": 1, "d.e.g": 1, "d.h": "cpu"},
        *({"a": 0, "b": 0, "b1": 0}, {"a.b": 0}, {"": "cpu"}, {}),
    ):
        assert ours.clean_device_map(dict(device_map)) == theirs.clean_device_map(dict(device_map)), device_map


def test_a_map_that_leaves_modules_out_names_them_and_for_an_unknown_name_the_nearest():
    model = seeded(Deep)
    with pytest.raises(ConfigurationError, match=r"head\.weight, head\.bias\. Add their modules to it: 'head'"):
        ours.check_device_map(model, {"gain": 0, "mask": 0, "body": "cpu"})
    with pytest.raises(ValueError, match=r"does not give any device for the following parameters: body\.1\.0\.scale"):
        ours.check_device_map(model, {"gain": 0, "mask": 0, "body.0": 0, "head": 0})
    ours.check_device_map(model, {"": 0})
    with pytest.warns(UserWarning, match=r"\['linear_1'\].*Did you mean \['linear1'\]"):
        ours.check_device_map(seeded(Small), {"": "cpu", "linear_1": "cpu"})


def test_tied_weights_on_two_devices_are_reported(caplog):
    ours.check_tied_parameters_on_same_device([["embed.weight", "head.weight"]], {"embed": 0, "head": "cpu"})
    assert "Tied parameters are on different devices" in caplog.text
    with pytest.raises(ValueError, match=r"does not contain the module head\.weight"):
        ours.check_tied_parameters_on_same_device([["embed.weight", "head.weight"]], {"embed": 0})


def test_devices_that_stay_empty_are_reported_and_a_walk_when_requested(caplog, capsys):
    caplog.set_level("INFO")
    found = ours.infer_auto_device_map(seeded(Small), {0: 50, 1: 10**4, "cpu": 10**4}, verbose=True)
    output = capsys.readouterr().out
    assert "Treating module linear1" in output
    assert "Putting linear2" in output
    assert set(found.values()) == {1}
    assert "insufficient memory:\n  - 0: " in caplog.text


def test_a_part_is_found_further_down_as_accelerate_does():
    model = seeded(Deep)
    sizes = theirs.compute_module_sizes(model)
    for limit in (0, 40, sizes["body.0.0.up"], sizes["body.0.0"], sizes["body.0"], 10**6, "1KB", "x"):
        found = ours.fallback_allocate(list(model.named_children()), sizes, limit, ["Block"], [])
        wanted = theirs.fallback_allocate(list(model.named_children()), sizes, limit, ["Block"], [])
        assert found[0] == wanted[0]
        assert [name for name, _ in found[2]] == [name for name, _ in wanted[2]]


def test_a_top_level_parameter_can_be_tied():
    model = seeded(Tied)
    model.shared = model.embed.weight
    # an IndexError under Accelerate
    found = ours.infer_auto_device_map(model, {0: 600, 1: 900, "cpu": 10**4}, clean_result=False)
    assert found["shared"] == found["embed"] == found["head"]
