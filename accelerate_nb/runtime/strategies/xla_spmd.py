"""One process drives all XLA devices as one; the compiler exchanges what their parts need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard
from weakref import WeakSet

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.host_copy import brought
from accelerate_nb.runtime.operations.nested import leaves_of, with_leaves
from accelerate_nb.runtime.strategies.prepare_request import PrepareRequest
from accelerate_nb.runtime.strategies.xla_ddp import XlaDDP
from accelerate_nb.runtime.training.compile import is_repeated_blocks
from accelerate_nb.runtime.world.mesh import Mesh
from accelerate_nb.runtime.world.world import World
from accelerate_nb.runtime.xla import spmd_tensors
from accelerate_nb.runtime.xla.mesh_plan import MeshPlan, XlaMesh

# The axes of a mesh of XLA devices, as those of a mesh of ranks.
_AXES = {"data": "dp_replicate", "fsdp": "dp_shard", "tensor": "tp"}


class XlaSPMD(XlaDDP):
    """
    Each XLA device has its part of every batch and, along the mesh's axis "fsdp", of every weight (torch_xla's FSDPv2).

    To the user there is one process with one device, and tensors that are whole. It does what torch_xla's
    `SpmdFullyShardedDataParallel` does, but to the model as it is: that one renames its weights, takes only outputs that are
    tensors or tuples, and cuts each weight in its longest dimension also where that does not divide.
    """

    def __init__(self, world: World, config: XlaMesh) -> None:
        super().__init__(world)
        spmd_tensors.begin(str(config.axes))
        self.plan = MeshPlan.of(config, spmd_tensors.count())
        self._mesh = spmd_tensors.make_mesh(self.plan.sizes)
        self._followed: WeakSet[Optimizer] = WeakSet()

    @property
    def mesh(self) -> Mesh:
        return Mesh(**{_AXES[axis]: degree for axis, degree in self.plan.sizes.items()})

    @property
    def xla_mesh(self) -> str:  # type: ignore[override]  # read only
        """The mesh as it was requested."""
        return str(self.plan)

    def prepare(self, requests: Sequence[PrepareRequest]) -> list[Any]:
        """Give an optimizer's state of a weight the weight's layout."""
        prepared = super().prepare(requests)
        for optimizer in self.optimizers:
            self._follow(optimizer)
        return prepared

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Let an optimizer step, its state sharded as `prepare` does it, also of an optimizer that it has not seen."""
        self._follow(optimizer)
        return super().step(optimizer, closure)

    def place(self, model: Module) -> Module:
        """The model on the devices, each weight in its layout; one that has a layout already keeps it."""
        model = super().place(model)
        _WeightSharding(self.plan, self._mesh, model)
        return model

    def wrap_model(self, model: Module) -> Module:
        """The model, between whose repeated blocks each device keeps to its samples, as it is made to recompute them."""
        model = super().wrap_model(model)
        samples = _OutputSharding(self.plan, self._mesh)
        for block in [block for part in model.modules() if is_repeated_blocks(part) for block in part.children()]:
            block.register_forward_hook(samples)
        spmd_tensors.recompute(self._recomputed(model))
        return model

    def model_state(self, model: Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The model's complete weights, on the CPU."""
        self.settle()
        return brought(super().model_state(model, unwrap=unwrap))

    def sent(self, batch: Any) -> Any:
        """A batch on the devices, each with its samples; what holds no tensors of the CPU is as it was."""
        keyed = batch.items() if isinstance(batch, Mapping) else [(None, batch)]
        leaves = [(key, leaf) for key, value in keyed for leaf in leaves_of(value, records=True)]
        going = [(key, leaf) for key, leaf in leaves if _is_on_cpu(leaf)]
        layouts = [self.plan.of_input(leaf.shape, key) for key, leaf in going]
        arrived = iter(spmd_tensors.sent([leaf for _, leaf in going], self.world.device, self._mesh, layouts))
        sent = (next(arrived) if _is_on_cpu(leaf) else leaf for _, leaf in leaves)
        return with_leaves(batch, sent, records=True)

    def _follow(self, optimizer: Optimizer) -> None:
        if optimizer not in self._followed:
            self._followed.add(optimizer)
            _OptimizerSharding(optimizer)

    def _recomputed(self, model: Module) -> list[Module]:
        requested = set(self.plan.config.recompute)
        found = [part for part in model.modules() if type(part).__name__ in requested]
        absent = sorted(requested - {type(part).__name__ for part in found})
        if absent:
            known = sorted({type(part).__name__ for part in model.modules()})
            raise ConfigurationError(
                f"XlaMesh(recompute=...) names {', '.join(absent)}, but the model has no layer of such a class; it has "
                f"{', '.join(known)}. Name some of those, or leave it out."
            )
        return found


@dataclass(frozen=True)
class _OutputSharding:
    """A hook of a layer: of its outputs each device has its samples."""

    plan: MeshPlan
    mesh: Any

    def __call__(self, _layer: Module, _inputs: Any, output: Any) -> Any:
        # without this the compiler may cut the activations as the weights are cut, and exchange those instead of these
        return tuple(map(self._apart, output)) if type(output) is tuple else self._apart(output)

    def _apart(self, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.device.type != "xla" or not output.is_floating_point():
            return output
        return spmd_tensors.laid_out(output, self.mesh, self.plan.of_input(output.shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> _OutputSharding:
        return self  # the devices of a copied model's layer are the same


class _WeightSharding:
    """Keeps the planned layout of a model's weights, also when others are loaded: a copy into a weight changes its layout."""

    def __init__(self, plan: MeshPlan, mesh: Any, model: Module) -> None:
        self._mesh = mesh
        self._layouts = plan.of_model(model)
        for name, tensor in _named_tensors(model):
            if tensor.device.type == "xla" and not spmd_tensors.is_laid(tensor):
                spmd_tensors.set_layout(tensor, mesh, self._layouts[name])
        model.register_load_state_dict_pre_hook(self._send)

    def _send(self, model: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        tensors = dict(_named_tensors(model))
        found = [(name, state.get(prefix + name), layout) for name, layout in self._layouts.items()]
        fits = [
            (name, value.to(tensors[name].dtype), layout)
            for name, value, layout in found
            if _is_on_cpu(value) and tensors[name].device.type == "xla" and len(layout) == value.ndim
        ]
        if fits:
            names, values, layouts = zip(*fits, strict=True)
            sent = spmd_tensors.sent(values, tensors[names[0]].device, self._mesh, layouts)
            state.update({prefix + name: value for name, value in zip(names, sent, strict=True)})

    def __deepcopy__(self, memo: dict[int, Any]) -> _WeightSharding:
        return self  # a copied model has weights of the same names, on the same devices


class _OptimizerSharding:
    """Gives an optimizer's state the layout of its weights; the compiler would choose a layout for each."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._known = 0
        optimizer.register_step_post_hook(self._stepped)
        optimizer.register_load_state_dict_post_hook(self._set_layout)
        self._set_layout(optimizer)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if len(optimizer.state) != self._known:
            self._set_layout(optimizer)

    def _set_layout(self, optimizer: Optimizer) -> None:
        self._known = len(optimizer.state)
        for weight, remembered in optimizer.state.items():
            for value in remembered.values():
                if isinstance(value, Tensor) and value.device.type == "xla" and value.shape == weight.shape:
                    spmd_tensors.shard_like(value, weight)


def _named_tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _is_on_cpu(leaf: Any) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"
