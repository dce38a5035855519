"""The strategy that splits layers along their width, by a plan, with torch's `parallelize_module`: each process computes a part."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, parallel
from torch.nn import Embedding, Linear, Module
from torch.utils._pytree import tree_map

from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.parallelism_config import ParallelismConfig, TorchTensorParallelConfig
from accelerate_nb.runtime.strategies.base import PrepareRequest
from accelerate_nb.runtime.strategies.sharded import InitialWeights, ShardedStrategy, shared_weights
from accelerate_nb.runtime.world.world import World

# The ways to split a layer by their names in plans, most of which are those of transformers.
STYLES: Mapping[str, Any] = {
    "colwise": parallel.ColwiseParallel,
    "rowwise": parallel.RowwiseParallel,
    "colwise_gather_output": lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": parallel.SequenceParallel,
    # a norm of each head, of which a process has some: (samples, tokens, heads, width of a head)
    "replicated_with_grad_allreduce": lambda: parallel.SequenceParallel(sequence_dim=2, use_local_output=True),
}
_WHOLE_OUTPUTS = ("colwise_gather_output", "colwise_rep")
_EXAMPLE = "TorchTensorParallelConfig(plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'})"


class TensorParallel(ShardedStrategy):
    """Every process has a part of the width of each layer that a plan names, and all see the same batches."""

    axes = ("tp",)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._splitter = LayerSplitter()

    def use_parallelism(self, config: ParallelismConfig) -> None:
        """Split layers along the configuration's mesh, by its plan or the model's own."""
        super().use_parallelism(config)
        self._splitter = LayerSplitter(config.tp_handler)

    def prepare_model(self, request: PrepareRequest) -> Module:
        """The model with split layers, and the first process's weights on all."""
        model: Module = request.value
        self.accept(model)
        model = self.precision.wrap_forward(model)
        weights = InitialWeights(self.world, getattr(model, "_init_weights", None))
        if self.world.size > 1:
            if self.device_mesh is None:
                self.device_mesh = init_device_mesh(self.world.device.type, (self.world.size,), mesh_dim_names=("tp",))
            self._splitter.split(model, self.device_mesh["tp"], weights)
        weights.bring(model)
        return self.compile(model, request.compiling)

    def close(self) -> None:
        """The training is over."""
        super().close()
        self._splitter.close()


class LayerSplitter:
    """Splits the layers of models as a configuration says."""

    def __init__(self, handler: TorchTensorParallelConfig | None = None) -> None:
        self._handler = handler or TorchTensorParallelConfig()
        self._losses = ExitStack()

    def split(self, model: Module, mesh: DeviceMesh, weights: InitialWeights) -> None:
        """Split a model's layers over a mesh in place, by the plan given or its own; one that was loaded in parts stays as it is."""
        if any(isinstance(weight, DTensor) for weight in model.parameters()):
            return
        for heads in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(getattr(model, "config", None), heads, None)
            if isinstance(count, int) and count % mesh.size():
                raise ConfigurationError(
                    f"tp={mesh.size()} was requested, but it does not divide {heads}={count}. Take a degree that does."
                )
        styles = _styles(model, self._handler.plan, mesh.size())
        output = self._split_output(model, styles) if self._handler.loss_parallel else None
        for name, style in styles.items():
            made = _style(name, style)
            if name == output:
                made = parallel.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            _split(name, model.get_submodule(name), mesh, made, weights)

    def _split_output(self, model: Module, styles: Mapping[str, Any]) -> str:
        """The name of the model's last layer, of whose output each process keeps its part for the loss."""
        name: str = [name for name, _ in model.named_modules() if name in styles][-1]
        style = styles[name]
        if style not in _WHOLE_OUTPUTS:
            raise ConfigurationError(
                f"loss_parallel=True was requested, but the plan of tp splits {type(model).__name__}'s {name} last, by {style!r}. The last "
                f"layer has to be one of its own weights, with an output for each class, that is split by {_WHOLE_OUTPUTS[0]!r}."
            )
        # once for several models
        self._losses.close()
        self._losses.enter_context(parallel.loss_parallel())
        # a loss that the model computed itself is a plain tensor again
        model.register_forward_hook(
            lambda _model, _arguments, output: tree_map(
                lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) and leaf.ndim == 0 else leaf, output
            )
        )
        return name

    def close(self) -> None:
        """Losses are computed as before."""
        self._losses.close()


def split_dimensions(model: Module) -> dict[str, int]:
    """The dimensions along which the model's own plan splits its weights, by their names; none where it has ways that are not known."""
    found: dict[str, int] = {}
    styles = _styles(model, None, 1)
    if not all(isinstance(style, parallel.ParallelStyle) or style in STYLES for style in styles.values()):
        return found
    for name, style in styles.items():
        layer, made = model.get_submodule(name), _style(name, style)
        if (split := _split_dimension(layer, made)) is None:
            continue
        found[f"{name}.weight"] = split[0]
        if isinstance(made, parallel.ColwiseParallel) and getattr(layer, "bias", None) is not None:
            found[f"{name}.bias"] = 0
    return found


def _styles(model: Module, given: Mapping[str, Any] | None, size: int) -> dict[str, Any]:
    """The plan's styles by names of layers, in the order of the plan."""
    plan = given or getattr(model, "tp_plan", None) or {}
    if not plan:
        raise ConfigurationError(
            f"tp={size} was requested, but {type(model).__name__} has no plan of its own. Pass one by names of its layers: "
            f"tp_handler={_EXAMPLE}."
        )
    shared = shared_weights(model)
    styles: dict[str, Any] = {}
    for pattern, style in plan.items():
        found = list(_named(model, pattern))
        if not found and given:
            names = [name for name, _ in model.named_modules() if name]
            raise ConfigurationError(
                f"The plan of tp names {pattern!r}, but the model has no such layer. "
                f"{did_you_mean(pattern, names, 'Names are ' + ', '.join(names[:6]) + ', …')}"
            )
        for name, layer in found:
            if not any(id(weight) in shared for weight in layer.parameters()):
                styles[name] = style
    return styles


def _split(name: str, layer: Module, mesh: DeviceMesh, style: parallel.ParallelStyle, weights: InitialWeights) -> None:
    size, split = mesh.size(), _split_dimension(layer, style)
    if split is not None and split[1] % size:
        raise ConfigurationError(
            f"tp={size} was requested, but it does not divide the width {split[1]} of {name}. Take another degree, or leave the layer "
            "out of the plan."
        )
    learns = {part: weight.requires_grad for part, weight in layer.named_parameters()}
    weights.bring(layer)
    parallel.parallelize_module(layer, mesh, style)
    for part, weight in layer.named_parameters():
        weight.requires_grad_(learns[part])
        if weight.requires_grad and isinstance(weight, DTensor):
            # gradients lie as weights do: what each process computed a summand of is added up, what is whole is cut
            weight.register_hook(partial(_placed_as, weight.placements))  # type: ignore[no-untyped-call]  # torch gives none


def _placed_as(placements: Sequence[Placement], gradient: DTensor) -> DTensor:
    return gradient.redistribute(placements=placements)


def _split_dimension(layer: Module, style: parallel.ParallelStyle) -> tuple[int, int] | None:
    """The dimension along which a way splits a layer's weight, and its width there, where they are known."""
    by_columns = isinstance(style, parallel.ColwiseParallel)
    if not isinstance(layer, (Linear, Embedding)) or not (by_columns or isinstance(style, parallel.RowwiseParallel)):
        return None
    dim = 0 if by_columns == isinstance(layer, Linear) else 1
    return dim, layer.weight.shape[dim]


def _style(pattern: str, style: Any) -> parallel.ParallelStyle:
    if isinstance(style, parallel.ParallelStyle):
        return style
    if style not in STYLES:
        raise ConfigurationError(
            f"The plan of tp splits {pattern!r} by {style!r}, which is not known here. {did_you_mean(str(style), STYLES)} Known "
            f"ones are {', '.join(STYLES)}; an object of torch's ParallelStyle works too."
        )
    made: parallel.ParallelStyle = STYLES[style]()
    return made


def _named(model: Module, pattern: str) -> Iterator[tuple[str, Module]]:
    """The modules whose names a pattern matches, part by part."""
    wanted = pattern.split(".")
    for name, module in model.named_modules():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield name, module
