"""Which part of each tensor lies where, without a device."""

from __future__ import annotations

import pytest
import torch

from accelerate_nb import ConfigurationError, XlaMesh
from accelerate_nb.runtime.xla.mesh_plan import VARIABLE, MeshPlan


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 16)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 48), torch.nn.Linear(48, 16)])
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight


def planned(axes, devices=4, **settings):
    return MeshPlan.of(XlaMesh(axes, **{"min_size": 100, **settings}), devices)


def test_weights_are_cut_in_the_first_dimension_that_divides_and_small_ones_are_not():
    layouts = planned("fsdp").of_model(Tied())
    assert layouts["embedding.weight"] == layouts["head.weight"] == (None, "fsdp")
    assert layouts["layers.0.weight"] == ("fsdp", None)
    assert layouts["layers.0.bias"] == (None,)
    assert layouts["norm.running_mean"] == (None,)
    assert layouts["norm.num_batches_tracked"] == ()
    assert set(layouts) >= set(Tied().state_dict())


def test_a_mesh_without_fsdp_leaves_weights_whole():
    assert {axis for layout in planned("data").of_model(Tied()).values() for axis in layout} == {None}


def test_the_first_rule_that_fits_any_name_of_a_weight_decides_how_it_lies():
    rules = {"head.*": ("tensor", "fsdp"), "*.weight": (None, None), "norm.*": (None,)}
    with pytest.raises(ConfigurationError, match="'norm\\.weight' has 2 entries"):
        planned("fsdp=2,tensor=2", rules=rules).of_model(Tied())
    rules = {"head.*": ["tensor", "fsdp"], "layers.?.weight": (("fsdp", "tensor"), None)}
    layouts = planned("fsdp=2,tensor=2", rules=rules).of_model(Tied())
    assert layouts["embedding.weight"] == ("tensor", "fsdp")
    assert layouts["layers.1.weight"] == (("fsdp", "tensor"), None)
    assert layouts["layers.1.bias"] == (None,)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"rules": {"lyers.0.weight": ("fsdp", None)}}, r"no weight is called.*Did you mean layers.0.weight\?"),
        ({"rules": {"*.weight": ("fsdp",)}}, "has 1 entries.*shape is .30, 16"),
        ({"rules": {"embedding.*": ("fsdp", None)}}, "cuts a dimension of 30 along 'fsdp', which has 4 devices"),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_an_error(settings, wrong):
    with pytest.raises(ConfigurationError, match=wrong):
        planned("fsdp", **settings).of_model(Tied())


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [
        (("model", None), "names the axis 'model'. The axes are"),
        (("tesnor", None), r"Did you mean tensor\?"),
        (("tensor", None), "but the mesh is 'fsdp=4'"),
        (("fsdp", "fsdp"), "names an axis twice"),
        ("fsdp", "an axis or None for each dimension"),
    ],
)
def test_a_rule_that_does_not_fit_the_mesh_is_an_error_before_there_is_a_model(layout, wrong):
    with pytest.raises(ConfigurationError, match=wrong):
        planned("fsdp", rules={"*": layout})


@pytest.mark.parametrize(
    ("axes", "devices", "shape", "layout"),
    [
        ("fsdp", 4, (8, 3), ("fsdp", None)),
        ("data=2,fsdp=4", 8, (8, 3), (("data", "fsdp"), None)),
        ("data=2,fsdp=4", 8, (4,), ("fsdp",)),
        ("data=2,fsdp=4", 8, (6,), ("data",)),
        ("data=2,fsdp=4", 8, (5, 8), (None, None)),
        ("tensor", 4, (8,), (None,)),
        ("data=2,tensor=2", 4, (8,), ("data",)),
        ("fsdp", 4, (), ()),
        ("fsdp", 4, (0, 2), (None, None)),
    ],
)
def test_samples_lie_along_data_and_fsdp_as_far_as_they_divide(axes, devices, shape, layout):
    assert planned(axes, devices).of_input(shape) == layout


def test_keys_of_a_batch_can_lie_otherwise():
    plan = planned("data=2,tensor=2", inputs={"ids": ("data", "tensor"), "table": (None, None)})
    assert plan.of_input((4, 6), "ids") == ("data", "tensor")
    assert plan.of_input((4, 6), "table") == (None, None)
    assert plan.of_input((4, 6), "labels") == ("data", None)
    with pytest.raises(ConfigurationError, match="for 'ids' cuts a dimension of 5"):
        plan.of_input((4, 5), "ids")


def test_the_axes_come_from_the_launch_where_the_code_names_none(monkeypatch):
    assert XlaMesh().axes is None
    monkeypatch.setenv(VARIABLE, "data=2,fsdp")
    assert XlaMesh(min_size=5).axes == "data=2,fsdp"
    assert XlaMesh("fsdp").axes == "fsdp"
    assert str(MeshPlan.of(XlaMesh(), 8)) == "data=2,fsdp=4"
