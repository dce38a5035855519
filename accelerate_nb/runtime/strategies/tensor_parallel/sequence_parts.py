"""Parts of sequences between split layers (sequence parallelism, Korthikanti et al., arXiv:2205.05198)."""

# Norms, and whatever else stands between layers that are split along their width, compute the same on all processes. Here each computes it
# for a part of the sequences instead: blocks begin with a cut, a split layer gathers what it takes, and adds up and cuts what it gives.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import Embedding, Linear, Module, ModuleDict, ModuleList

from accelerate_nb.errors import ConfigurationError, DataError
from accelerate_nb.runtime.strategies.context_parallel.sequence_part import refuse_recurrent
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.fsdp.wrapping import block_policy

# The styles of plans, as far as parts of sequences concern them: what gathers its input, what cuts its output, and norms of heads.
_GATHERING = ("colwise", "colwise_gather_output", "colwise_rep")
_CUTTING = ("rowwise", "rowwise_split_input", "rowwise_rep")
_BESIDE = ("replicated_with_grad_allreduce",)
_PARTS, _WHOLE = (Shard(1),), (Replicate(),)


class SequenceParts:
    """
    The places of a model at which sequences are cut and gathered again.

    `styles` has the plan's styles by names of modules, of which only those count that are split. `ConfigurationError` for a model of which
    it is not known where they would be.
    """

    def __init__(self, model: Module, mesh: DeviceMesh, styles: Mapping[str, Any]) -> None:
        refuse_recurrent(model, "sequence_parallel=True")
        self._model, self._mesh, self._styles = model, mesh, styles
        self._blocks = _blocks(model)
        self._length = 0
        names = list(dict(model.named_modules()))
        self._position = {name: index for index, name in enumerate(names)}
        self._gathers_once = {
            parent
            for name in styles
            if self._is_in_block(name)
            and styles[name] in _GATHERING
            and self._computes_split(parent := name.rpartition(".")[0])
        }
        self._behind = [
            name
            for name, module in model.named_modules()
            if self._position[name] > self._position[self._blocks[-1]]
            and not self._is_in_block(name)
            and next(module.parameters(recurse=False), None) is not None
        ]

    def is_behind(self, name: str) -> bool:
        """Whether a module comes after all blocks."""
        return name in self._behind

    def style(self, name: str, style: Any, made: ParallelStyle) -> ParallelStyle:
        """The way in which a layer is split that the plan splits in such a style, and that would be `made` for whole sequences."""
        if not self._is_in_block(name) and not self.is_behind(name):
            return made
        if isinstance(made, ColwiseParallel) and name.rpartition(".")[0] not in self._gathers_once:
            return ColwiseParallel(
                input_layouts=Shard(1), output_layouts=made.output_layouts[0], use_local_output=made.use_local_output
            )
        if isinstance(made, RowwiseParallel) and style in _CUTTING:
            return RowwiseParallel(input_layouts=made.input_layouts[0], output_layouts=Shard(1))
        return made

    def attach(self) -> None:
        """Cut what blocks begin with, gather before what is not split, and have what is between compute with parts."""
        self._cut_at(self._model.get_submodule(self._blocks[0]))
        for name in self._gathers_once:
            self._model.get_submodule(name).register_forward_pre_hook(self._gathered, with_kwargs=True, prepend=True)
        ends = self._behind[-1] if self._behind else self._blocks[-1]
        is_whole_at_end = False
        for name, module in list(self._model.named_modules()):
            if name in self._styles or next(module.parameters(recurse=False), None) is None:
                is_whole_at_end |= name == ends and self._styles.get(name) in _GATHERING
            elif self._is_in_block(name):
                self._check(name, module)
                self._compute_parts(module)
            elif self.is_behind(name) and isinstance(module, Linear):
                module.register_forward_pre_hook(self._gathered, with_kwargs=True)
                is_whole_at_end |= name == ends
            elif self.is_behind(name):
                self._check(name, module)
                self._compute_parts(module)
        if not is_whole_at_end:
            self._model.get_submodule(ends).register_forward_hook(self._gathered_output)

    def _is_in_block(self, name: str) -> bool:
        return any(name == block or name.startswith(f"{block}.") for block in self._blocks)

    def _computes_split(self, name: str) -> bool:
        """Whether a module has nothing but layers that are split, so that it can gather once for all of them."""
        if not name or name in self._blocks:
            return False
        module = self._model.get_submodule(name)
        if isinstance(module, (ModuleList, ModuleDict)):
            return False
        with_weights = [
            f"{name}.{part}"
            for part, child in module.named_modules()
            if next(child.parameters(recurse=False), None) is not None
        ]
        return all(self._styles.get(part) in (*_GATHERING, *_CUTTING, *_BESIDE) for part in with_weights)

    def _check(self, name: str, module: Module) -> None:
        if isinstance(module, (Linear, Embedding)):
            raise ConfigurationError(
                f"sequence_parallel=True was requested, but the plan of tp does not say how {name} ({type(module).__name__}) is split. Name "
                "it in the plan, or leave sequence_parallel out."
            )

    def _compute_parts(self, module: Module) -> None:
        module.register_forward_pre_hook(self._check_length, prepend=True)
        learns = {name: weight.requires_grad for name, weight in module.named_parameters(recurse=False)}
        parallelize_module(module, self._mesh, SequenceParallel(use_local_output=True))
        for name, weight in module.named_parameters(recurse=False):
            weight.requires_grad_(learns[name])
            share_gradient(weight)

    # At run time

    def _cut_at(self, block: Module) -> None:
        def cut(_block: Module, arguments: Any, keywords: Any) -> Any:
            found = _Input.of(arguments, keywords)
            length, size = found.tensor.shape[1], self._mesh.size()
            if length % size:
                raise DataError(
                    f"Sequences of {length} were given to a model that sequence_parallel=True cuts in {size} parts. Pad them to a multiple "
                    f"of {size}, or leave sequence_parallel out."
                )
            self._length = length // size
            return found.replaced(_redistributed(found.tensor, self._mesh, _WHOLE, _PARTS).to_local())

        block.register_forward_pre_hook(cut, with_kwargs=True, prepend=True)

    def _gathered(self, _module: Module, arguments: Any, keywords: Any) -> Any:
        found = _Input.of(arguments, keywords)
        self._check_length(_module, (found.tensor,))
        whole = _redistributed(found.tensor, self._mesh, _PARTS, _WHOLE)
        # a layer that is whole takes a plain tensor, and gives a gradient that is whole
        is_split = any(isinstance(weight, DTensor) for weight in _module.parameters())
        return found.replaced(whole if is_split else whole.to_local())

    def _gathered_output(self, _module: Module, _arguments: Any, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        whole = _redistributed(tensor, self._mesh, _PARTS, _WHOLE).to_local()
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _check_length(self, module: Module, inputs: Sequence[Any]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim > 1 and inputs[0].shape[1] != self._length:
            raise ConfigurationError(
                f"A {type(module).__name__} of the model got a tensor of shape {tuple(inputs[0].shape)}, and should have got a part of "
                f"sequences, {self._length} long. The model does not hand sequences from block to block: leave sequence_parallel out."
            )


@dataclass(frozen=True, slots=True)
class _Input:
    """The tensor with sequences among the arguments of a call: the first one, or that of the name `hidden_states`."""

    tensor: Tensor
    replaced: Callable[[Tensor], tuple[Any, Any]]

    @classmethod
    def of(cls, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Input:
        if arguments and isinstance(arguments[0], Tensor):
            return cls(arguments[0], lambda tensor: ((tensor, *arguments[1:]), keywords))
        name = next((name for name in ("hidden_states", *keywords) if isinstance(keywords.get(name), Tensor)), None)
        if name is None:
            raise ConfigurationError(
                "sequence_parallel=True was requested, but the model calls a block without a tensor. Leave it out."
            )
        return cls(keywords[name], lambda tensor: (arguments, {**keywords, name: tensor}))


def share_gradient(weight: Tensor) -> None:
    """Have a weight's gradients lie on processes as the weight does: what each computed a summand of is added up, what is whole is cut."""
    if weight.requires_grad and isinstance(weight, DTensor):
        weight.register_hook(lambda gradient: gradient.redistribute(placements=weight.placements))


def _redistributed(tensor: Tensor, mesh: DeviceMesh, before: Any, after: Any) -> DTensor:
    found = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, before, run_check=False)
    return found.redistribute(placements=after)


def _blocks(model: Module) -> list[str]:
    """The names of the modules that sequences pass through one after the other."""
    is_block = block_policy(model, FullyShardedDataParallelPlugin(fsdp_version=2))
    found = [name for name, module in model.named_modules() if module is not model and is_block(module)]
    lists = {name.rpartition(".")[0] for name in found}
    if len(lists) != 1:
        raise ConfigurationError(
            f"sequence_parallel=True was requested, but {type(model).__name__} has {len(lists)} lists of equal blocks, and sequences are "
            "cut where one list begins. Leave it out."
        )
    return found
