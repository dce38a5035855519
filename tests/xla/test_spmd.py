"""One process that drives four devices over a mesh trains what a CPU trains, with its weights and batches in parts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator, launch

DEVICES = 4
# What is cut so along "tensor" is cut again in the next layer, so that a device needs no other's activations between the two.
RULES = {"*.up.weight": ("tensor", None), "*.up.bias": ("tensor",), "*.down.weight": (None, "tensor")}
MESHES = {
    "data": {"recompute": ["Block"]},
    "fsdp": {},
    "data=2,fsdp=2": {},
    "fsdp=2,tensor=2": {"rules": RULES},
}
# with batches of 8, the last one is of 6, which four devices can't share
SAMPLES = torch.randint(0, 32, (30, 6), generator=torch.Generator().manual_seed(1))


class Block(torch.nn.Module):
    """A layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.qkv = torch.nn.Linear(16, 48)
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.down(torch.relu(self.up(scaled_dot_product_attention(query, key, value))))


class Language(torch.nn.Module):
    """A small language model whose embedding is its head, too."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList([Block()])
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made():
    torch.manual_seed(0)
    model = Language()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3), DataLoader(SAMPLES, batch_size=8)


def loss_of(model, batch):
    return cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())


def on_the_cpu(epochs=1, every=1):
    """The training as plain PyTorch has it."""
    model, optimizer, loader = made()
    for _ in range(epochs):
        for number, batch in enumerate(loader, start=1):
            (loss_of(model, batch) / every).backward()
            if number % every == 0 or number == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def epoch(accelerator, model, optimizer, loader):
    """One epoch, with how many programs there were after each batch, and the parts of each batch."""
    from accelerate_nb.runtime.xla import device as xla, spmd_tensors

    counts, batches = [], []
    for batch in loader:
        counts.append(xla.compilations())
        batches.append(spmd_tensors.parts_of(batch))
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return counts, batches


def trained(axes, settings, **how):
    """What a training over a mesh leaves."""
    from accelerate_nb import XlaMesh
    from accelerate_nb.runtime.xla import spmd_tensors

    accelerator = Accelerator(kwargs_handlers=[XlaMesh(axes, min_size=100, **settings)], **how)
    model, optimizer, loader = accelerator.prepare(*made())
    counts, batches = epoch(accelerator, model, optimizer, loader)
    weights = accelerator.get_state_dict(model)
    ones = torch.arange(8.0, device=accelerator.device)
    results = {
        "counts": counts,
        "batches": batches,
        "weights": weights,
        "devices": {item.device.type for item in weights.values()},
        "parts": {name: spmd_tensors.parts_of(parameter) for name, parameter in model.named_parameters()},
        "states": {
            name: {
                tuple(spmd_tensors.parts_of(item))
                for item in optimizer.state[weight].values()
                if item.device.type == "xla"
            }
            for name, weight in model.named_parameters()
        },
        "tied": model.head.weight is model.embedding.weight,
        "gathered": accelerator.gather_for_metrics(ones).tolist(),
        "reduced": accelerator.reduce(ones, "sum").tolist(),
        "place": (accelerator.process_index, accelerator.num_processes, str(accelerator.device)),
        "state": str(accelerator.state),
    }
    accelerator.end_training()
    return results


def resumed(folder):
    """Two epochs at a stretch, and the second one after a checkpoint, over another mesh, too."""
    from accelerate_nb import XlaMesh
    from accelerate_nb.runtime.xla import spmd_tensors

    def begun(axes):
        accelerator = Accelerator(kwargs_handlers=[XlaMesh(axes, min_size=100)])
        return accelerator, *accelerator.prepare(*made())

    accelerator, *training = begun("fsdp")
    epoch(accelerator, *training)
    accelerator.save_state(folder)
    accelerator.save_model(training[0], folder + "-model")
    saved = accelerator.get_state_dict(training[0])
    epoch(accelerator, *training)
    straight = accelerator.get_state_dict(training[0])
    accelerator.end_training()
    found = {"saved": saved, "straight": straight}
    for axes in ("fsdp", "data=2,fsdp=2"):
        accelerator, *training = begun(axes)
        accelerator.load_state(folder)
        model, optimizer, _ = training
        weight = model.embedding.weight
        found[f"loaded over {axes}"] = accelerator.get_state_dict(model)
        found[f"parts over {axes}"] = [
            spmd_tensors.parts_of(item)[:1] for item in (weight, optimizer.state[weight]["exp_avg"])
        ]
        epoch(accelerator, *training)
        found[f"resumed over {axes}"] = accelerator.get_state_dict(model)
        accelerator.end_training()
    return found


def misfit(axes):
    try:
        trained(axes, {})
    except ValueError as error:
        return str(error)
    return "nothing"


def everything(folder):
    """All that is shown here, in one process: it takes seconds to begin."""
    results = {axes: trained(axes, settings) for axes, settings in MESHES.items()}
    results["accumulated"] = trained("fsdp", {}, gradient_accumulation_steps=2)
    results["bf16"] = trained("fsdp", {}, mixed_precision="bf16")
    results["launched"] = str(launched_state())
    results["misfit"] = misfit("data=3,fsdp")
    return results | resumed(folder)


def launched_state():
    accelerator = Accelerator()
    text = str(accelerator.state)
    accelerator.end_training()
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spmd") / "checkpoint"


@pytest.fixture(scope="module")
def results(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        patch.setenv("CPU_NUM_DEVICES", str(DEVICES))
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles in a third of the time
        options = {"config_file": "", "folder": str(folder.parent / "runs"), "panel": "off", "xla_mesh": "fsdp=4"}
        return launch(everything, (str(folder),), num_processes=1, **options).wait(390)


def far(weights, references):
    assert list(weights) == list(references)
    return max(float((weights[name] - references[name]).abs().max()) for name in weights)


each_mesh = pytest.mark.parametrize("axes", MESHES)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@each_mesh
def test_a_mesh_trains_what_a_cpu_trains(results, axes):
    assert results[axes]["tied"]
    assert far(results[axes]["weights"], on_the_cpu()) < 1e-4
    assert results[axes]["devices"] == {"cpu"}


@pytest.mark.parametrize(
    ("axes", "embedding", "up", "bias"),
    [
        ("data", (32, 16), (32, 16), (32,)),
        ("fsdp", (8, 16), (8, 16), (32,)),
        ("data=2,fsdp=2", (16, 16), (16, 16), (32,)),
        ("fsdp=2,tensor=2", (16, 16), (16, 16), (16,)),
    ],
)
def test_each_device_has_its_part_of_weights_and_of_what_the_optimizer_remembers(results, axes, embedding, up, bias):
    parts, states = results[axes]["parts"], results[axes]["states"]
    assert parts["embedding.weight"] == [embedding] * DEVICES
    assert parts["layers.0.up.weight"] == [up] * DEVICES
    assert parts["layers.0.up.bias"] == [bias] * DEVICES
    assert states == {name: {tuple(part)} for name, part in parts.items()}


@pytest.mark.parametrize(
    ("axes", "rows", "last"),
    [("data", 2, 6), ("fsdp", 2, 6), ("data=2,fsdp=2", 2, 3), ("fsdp=2,tensor=2", 4, 3)],
)
def test_each_device_has_its_samples_of_a_batch_as_far_as_they_divide(results, axes, rows, last):
    assert results[axes]["batches"] == [[(rows, 6)] * DEVICES] * 3 + [[(last, 6)] * DEVICES]


@pytest.mark.parametrize("axes", [*MESHES, "bf16"])
def test_nothing_is_compiled_after_the_second_step_but_for_a_batch_of_another_size(results, axes):
    first, second, third, last = results[axes]["counts"]
    assert first < second == third - 1
    assert last == third


def test_accumulated_gradients_make_the_steps_of_a_cpu(results):
    assert far(results["accumulated"]["weights"], on_the_cpu(every=2)) < 1e-4


def test_bf16_stays_near(results):
    weights = results["bf16"]["weights"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert 0 < far(weights, on_the_cpu()) < 0.05


def test_it_is_one_process_whose_tensors_are_whole(results):
    for axes in MESHES:
        assert results[axes]["place"] == (0, 1, "xla:0")
        assert results[axes]["gathered"] == list(range(8))
        assert results[axes]["reduced"] == list(range(8))


def test_the_state_names_the_mesh(results):
    assert "XLA mesh: data=2,fsdp=2\n" in results["data=2,fsdp=2"]["state"]
    assert "XLA mesh: fsdp=4\n" in results["launched"]


def test_a_mesh_that_does_not_fit_the_devices_is_an_error(results):
    assert "needs a multiple of 3 devices, but there are 4" in results["misfit"]


def test_a_resumed_training_equals_a_straight_one(results):
    assert far(results["loaded over fsdp"], results["saved"]) == 0
    assert far(results["resumed over fsdp"], results["straight"]) == 0
    assert results["parts over fsdp"] == [[(8, 16)], [(8, 16)]]


def test_a_checkpoint_loads_over_another_mesh(results):
    assert far(results["loaded over data=2,fsdp=2"], results["saved"]) == 0
    assert far(results["resumed over data=2,fsdp=2"], results["straight"]) < 1e-4
    assert results["parts over data=2,fsdp=2"] == [[(16, 16)], [(16, 16)]]


def test_a_checkpoint_of_a_mesh_loads_on_a_cpu(results, folder):
    from safetensors.torch import load_file

    accelerator = Accelerator(cpu=True)
    model, _, _ = accelerator.prepare(*made())
    accelerator.load_state(folder)
    assert far(model.state_dict(), results["saved"]) == 0
    assert load_file(folder.with_name("checkpoint-model") / "model.safetensors").keys() == set(results["saved"]) - {
        "head.weight"
    }
    accelerator.end_training()


SCRIPT = """
import sys
from accelerate_nb import Accelerator, XlaMesh
if "awake" in sys.argv:
    import torch_xla
    torch_xla.device()
print(Accelerator(kwargs_handlers=[XlaMesh("data=2,fsdp")] if "code" in sys.argv else []).state)
"""


def script(*arguments, **variables):
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES), **variables}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_plain_script_gets_its_mesh_from_code_or_the_environment():
    assert "XLA mesh: data=2,fsdp=2\n" in script("code").stdout
    assert "XLA mesh: fsdp=4\n" in script(ACCELERATE_NB_XLA_MESH="fsdp").stdout


def test_a_runtime_that_drives_single_devices_already_is_an_error():
    ended = script("awake", ACCELERATE_NB_XLA_MESH="fsdp")
    assert "The mesh 'fsdp' was requested, but torch_xla's runtime is awake in this process" in ended.stderr
    assert ended.returncode == 1
