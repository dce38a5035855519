"""Hooks around a module's forward do what Accelerate's do, and leave no trace when they are taken off."""

import copy
import pickle

import accelerate.big_modeling as their_models
import accelerate.hooks as theirs
import pytest
import torch
from torch import nn

import accelerate_nb.big_modeling as our_models
import accelerate_nb.hooks as ours
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.utils.modeling import align_module_device, has_offloaded_params
from tests.big_models.models import Block, Deep, Small, Unused, seeded

BOTH = [pytest.param(theirs, id="accelerate"), pytest.param(ours, id="accelerate_nb")]


class Doubling(ours.ModelHook):
    """Stands at the top level, so that it can be pickled."""

    def post_forward(self, module, output):
        return 2 * output


def test_a_hook_takes_the_place_of_the_former_or_comes_after_it_and_may_turn_gradients_off():
    model, x, hook = seeded(Small), torch.randn(2, 3), Doubling()
    plain = model(x)
    for append, factor in ((False, 2), (False, 2), (True, 4)):
        ours.add_hook_to_module(model, hook, append)
        assert torch.equal(model(x), factor * plain)
    assert model(x).requires_grad
    hook.no_grad = True
    ours.add_hook_to_module(model, hook)
    assert not model(x).requires_grad


def test_a_hook_that_is_removed_leaves_the_forward_that_was_there():
    model, x = seeded(Small), torch.randn(2, 3)
    before = set(model.__dict__)
    ours.add_hook_to_module(model, ours.ModelHook())
    assert set(model.__dict__) - before == {"_hf_hook", "_old_forward", "forward"}
    assert model.forward.__name__ == "forward"
    ours.remove_hook_from_module(model)
    assert set(model.__dict__) == before
    model.forward = lambda x: x + 1
    ours.add_hook_to_module(model, Doubling())
    assert torch.equal(model(x), 2 * (x + 1))
    ours.remove_hook_from_module(model)
    assert torch.equal(model(x), x + 1)


def test_a_deep_copy_of_a_hooked_model_is_a_model_of_its_own():
    model, x = seeded(Small), torch.randn(2, 3)
    ours.add_hook_to_module(model, Doubling())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.linear2.bias += 1
    assert torch.allclose(twin(x), model(x) + 2)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), model(x))


def test_a_graph_module_can_be_hooked():
    graph = torch.fx.symbolic_trace(seeded(Unused))
    x = torch.randn(2, 3)
    plain = graph(x)
    ours.add_hook_to_module(graph, Doubling())
    assert torch.equal(graph(x), 2 * plain)
    ours.remove_hook_from_module(graph)
    assert torch.equal(graph(x), plain)
    graph.recompile()
    assert torch.equal(graph(x), plain)


@pytest.mark.slow
def test_hooked_models_can_be_compiled():
    model, x = seeded(Small), torch.randn(2, 3)
    plain = model(x)
    ours.attach_align_device_hook(model, execution_device="cpu", offload=True)
    assert torch.allclose(torch.compile(model, backend="eager")(x), plain, atol=1e-6)
    assert model.linear1.weight.is_meta


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("buffers", [False, True])
def test_offloaded_weights_come_for_each_forward_and_go(package, buffers):
    model, x = seeded(Small), torch.randn(2, 3)
    plain, state = model(x), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    package.attach_align_device_hook(model, execution_device="cpu", offload=True, offload_buffers=buffers)
    assert model.linear1.weight.is_meta
    assert model.batchnorm.running_mean.is_meta == buffers
    assert not hasattr(model, "_hf_hook")  # it has no tensors of its own
    assert torch.equal(model(x), plain)
    assert torch.equal(model(x), plain)
    assert model.linear1.weight.is_meta
    package.remove_hook_from_submodules(model)
    assert {name: tensor.device.type for name, tensor in model.state_dict().items()} == dict.fromkeys(state, "cpu")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(x), plain)


def test_an_offloading_hook_without_a_device_is_named():
    model = seeded(Small)
    ours.attach_align_device_hook(model, offload=True)
    with pytest.raises(ConfigurationError, match="execution_device"):
        model(torch.randn(2, 3))


@pytest.mark.parametrize("package", BOTH)
def test_gradients_reach_the_input_of_an_offloaded_model_and_the_weights_of_another(package):
    x = torch.randn(2, 3, requires_grad=True)
    again, plain, model, offloaded = x.detach().clone().requires_grad_(), *(seeded(Small) for _ in range(3))
    plain(x).sum().backward()
    package.attach_align_device_hook_on_blocks(model, execution_device={"": "cpu"}, offload={"": False})
    model(x.detach()).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    package.attach_align_device_hook(offloaded, execution_device="cpu", offload=True)
    offloaded(again).sum().backward()
    assert torch.equal(x.grad, again.grad)


@pytest.mark.parametrize("package", BOTH)
def test_a_module_that_uses_its_childrens_weights_can_load_them_whole(package):
    model, x = nn.Sequential(seeded(Unused), nn.ReLU()), torch.randn(2, 3)
    plain = model(x)
    package.attach_align_device_hook(model, execution_device="cpu", offload=True, preload_module_classes=["Unused"])
    assert model[0].linear1.weight.is_meta
    assert torch.equal(model(x), plain)
    assert model[0].linear1.weight.is_meta
    assert not hasattr(model[0].linear1, "_hf_hook")
    if package is ours:  # Accelerate leaves the second name where it was
        tied = seeded(Square)
        plain = tied(x)
        ours.attach_align_device_hook(tied, execution_device="cpu", offload=True, preload_module_classes=["Square"])
        assert tied.b.weight.is_meta
        assert torch.equal(tied(x), plain)


class Square(nn.Module):
    """Two layers with one weight, whose forward calls neither."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return x @ self.a.weight @ self.b.weight


@pytest.mark.parametrize("package", BOTH)
def test_an_output_goes_where_the_input_was_and_skipped_keys_stay(package):
    layer = nn.Linear(2, 2)
    package.add_hook_to_module(layer, package.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert layer(torch.randn(1, 2)).device.type == "cpu"
    hook = package.AlignDevicesHook(execution_device="meta", io_same_device=True, skip_keys="extra")
    block = package.add_hook_to_module(Block(3), hook)
    args, kwargs = block._hf_hook.pre_forward(block, torch.ones(3), extra=torch.ones(3), other=[torch.ones(3)])
    assert args[0].is_meta
    assert not kwargs["extra"].is_meta
    assert kwargs["other"][0].is_meta
    assert hook.input_device == torch.device("cpu")


def test_hooks_of_blocks_stand_where_accelerate_puts_them():
    places = {"gain": "cpu", "mask": "cpu", "body.0": "cpu", "body.1.0": "cpu", "body.1.1": "cpu", "head": "cpu"}
    offload = {"gain": False, "mask": False, "body.0": True, "body.1.0": False, "body.1.1": True, "head": False}
    found = []
    for item in (theirs, ours):
        model = seeded(Deep)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        item.attach_align_device_hook_on_blocks(model, places, offload, weights_map=weights, skip_keys="mask")
        hooks = [getattr(module, "_hf_hook", None) for module in model.modules()]
        found.append([(type(item).__name__, repr(item)) for hook in hooks for item in getattr(hook, "hooks", (hook,))])
        assert torch.equal(model(torch.ones(2, 8)), seeded(Deep)(torch.ones(2, 8)))
    assert found[0] == found[1]


def test_one_device_and_one_request_make_hooks_for_the_whole_model():
    model, x = seeded(Deep), torch.ones(2, 8)
    plain = model(x)
    ours.attach_align_device_hook_on_blocks(model, "cpu", True, preload_module_classes=["Block"])
    assert model.body[0][0].up.weight.is_meta
    assert has_offloaded_params(model.body[0][0])
    assert not hasattr(model.body[0][0].up, "_hf_hook")
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("package", BOTH)
def test_a_block_brings_offloaded_weights_where_they_can_be_read(package):
    layer = nn.Linear(2, 2)
    weight = layer.weight.detach().clone()
    package.add_hook_to_module(layer, package.AlignDevicesHook("cpu", offload=True))
    assert has_offloaded_params(layer)  # of Accelerate's hooks, too: transformers attaches those
    with align_module_device(layer):
        assert torch.equal(layer.weight, weight)
    assert layer.weight.is_meta
    with pytest.raises(KeyError), align_module_device(layer, "cpu"):
        raise KeyError
    assert layer.weight.is_meta
    assert layer._hf_hook.execution_device == "cpu"
    package.add_hook_to_module(layer, package.ModelHook(), append=True)
    assert has_offloaded_params(layer)  # behind another hook


def test_a_block_moves_parameters_that_are_not_offloaded():
    layer = nn.Linear(2, 2)
    with align_module_device(layer):
        assert layer.weight.device.type == "cpu"
    with pytest.raises(ValueError, match="meta device"), align_module_device(layer, "meta"):
        assert layer.weight.is_meta  # and has lost its numbers, so it can't come back


@pytest.mark.parametrize("package", BOTH)
def test_models_take_turns(package):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.ones(1, 2)
    plain = second(first(x))
    hook = package.CpuOffload(execution_device="cpu")
    package.add_hook_to_module(first, hook)
    user = package.UserCpuOffloadHook(first, hook)
    package.add_hook_to_module(second, package.CpuOffload(execution_device="cpu", prev_module_hook=user))
    assert torch.equal(second(first(x)), plain)
    user.offload()
    user.remove()
    assert not hasattr(first, "_hf_hook")


@pytest.mark.parametrize("package", BOTH)
def test_each_call_gets_its_arguments_on_the_models_device(package):
    model = package.add_hook_to_module(nn.Linear(2, 2), package.CpuOffload("meta"))
    assert [model(torch.ones(1, 2)).device.type for _ in range(2)] == ["meta"] * 2


def test_a_model_goes_to_the_current_one_of_several_accelerators(monkeypatch):
    monkeypatch.setattr("accelerate_nb.big_models.tensors.accelerator", lambda: "cuda")
    assert ours.CpuOffload().execution_device == torch.device("cuda")


@pytest.mark.parametrize("skips", [{}, {"skip_modules_pattern": ("linear1",)}, {"skip_modules_classes": (nn.Linear,)}])
def test_layers_compute_what_accelerates_compute(skips):
    found = []
    for package in (their_models, our_models):
        model = seeded(Small)
        package.attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, **skips)
        found.append((model(torch.ones(2, 3)), {name: parameter.dtype for name, parameter in model.named_parameters()}))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[1][1]["batchnorm.weight"] == torch.float32


def test_a_pattern_may_be_one_text():
    model = seeded(Deep)
    pattern = r"body\.1|head"
    our_models.attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=pattern)
    assert model.body[0][0].up.weight.dtype == torch.float8_e4m3fn
    assert model.body[1][0].up.weight.dtype == torch.float32  # Accelerate reads the text letter by letter
    assert model.body[0][0].scale.dtype == torch.float32
    assert model(torch.ones(1, 8)).dtype == torch.float32
    assert model.body[0][0].up.weight.dtype == torch.float8_e4m3fn
