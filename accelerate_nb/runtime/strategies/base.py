"""The base of strategies, which decide how a training is spread over processes; the default is one process that has everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.host_copy import complete, offloading_hooks
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, load_weights, read_states, with_aliases
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, file_of_weights, files_of
from accelerate_nb.runtime.compat.dataclasses import DistributedType
from accelerate_nb.runtime.compat.packages import is_bitsandbytes_multi_backend_available
from accelerate_nb.runtime.parallelism_config import ParallelismConfig
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions, choose_precision
from accelerate_nb.runtime.training import repoint
from accelerate_nb.runtime.training.compile import TorchDynamoPlugin
from accelerate_nb.runtime.training.unwrap import extract_model_from_parallel
from accelerate_nb.runtime.world.world import Mesh, World
from accelerate_nb.user_warnings import warn_user

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate_nb.runtime.strategies.context_parallel import ContextParallel


# Positional and keyword arguments of a model; a loss of its output and of targets; options of `load_state`.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
LossOf = Callable[[Any, Any], Tensor]
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """A model or optimizer to prepare: `is_placed` moves it to this device, `is_trained` gives a model gradients."""

    value: Any
    compiling: TorchDynamoPlugin
    is_placed: bool = True
    is_trained: bool = True


@dataclass(frozen=True, slots=True)
class PrepareCall:
    """All objects of a call of `prepare`, and how batches are dealt out; `sequence_parts` of the `processes` have one batch together."""

    objects: Sequence[Any]
    split_batches: bool = False
    processes: int = 1
    sequence_parts: int = 1
    accelerator: Any = None

    @property
    def replicas(self) -> int:
        """The number of different streams of batches."""
        return self.processes // self.sequence_parts


class Placeholder:
    """An object that stands for another one, which a strategy of the name `made_by` makes in `prepare`."""

    made_by: ClassVar[str]


def refuse_placeholder(item: Any) -> None:
    """Raise `ConfigurationError` where an object is a placeholder that this run's strategy has left as it is."""
    if isinstance(item, Placeholder):
        raise ConfigurationError(
            f"prepare was given a {type(item).__name__}, a placeholder of what {item.made_by} makes, in a run that does not train "
            f"with it. Pass strategy={item.made_by.lower()!r}, or an object of your own in its place."
        )


class Strategy:
    """
    One process has the whole model and sees all data.

    Another strategy is a class below this one that overrides what it does otherwise; `Accelerator(strategy=...)` takes it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.precision = Precision()
        self.optimizers: list[Optimizer] = []
        # where processes have parts of sequences
        self.context: ContextParallel | None = None
        # former weights with those that took their place, for optimizers that are prepared later
        self._replaced = WeakIdKeyDictionary()

    @property
    def distributed_type(self) -> DistributedType:
        """Hugging Face's name of this way of distributing on these devices."""
        return DistributedType.of(self.world.size, self.world.device.type)

    # Facts that Accelerate's own names ask for; a strategy that has one overrides it
    is_fsdp2 = False
    deepspeed_plugin: Any = None
    deepspeed_plugins: Mapping[str, Any] | None = None
    fsdp_plugin: Any = None
    torch_tp_plugin: Any = None
    megatron_lm_plugin: Any = None
    parallelism_config: ParallelismConfig | None = None
    device_mesh: DeviceMesh | None = None
    # the class of a prepared optimizer, where it is not the usual one; classes of what is given in the place of an optimizer, and of
    # schedules beside torch's
    optimizer_class: type | None = None
    placeholder_types: tuple[type, ...] = ()
    schedule_types: tuple[type, ...] = ()
    # whether every process holds all weights, so that it could train by itself for a while
    copies_are_whole: bool = True
    # whether hooks of save_state and load_state get complete weights; without it `files` writes, and `load` reads, each process's own
    hooks_get_weights: bool = True
    # the library that keeps gradients in memory of its own, where `window_gradients` can't read them
    gradients_kept_by: str | None = None
    # the axes of a mesh along which the strategy can spread a training
    axes: tuple[str, ...] = ()

    @property
    def default_mesh(self) -> Mesh:
        """The mesh of a training for which none was requested: all ranks along the strategy's first axis."""
        return Mesh(**{self.axes[0] if self.axes else "dp_replicate": self.world.size})

    @property
    def data_replicas(self) -> tuple[int, int]:
        """The index of this process's stream of batches, and the number of different streams."""
        return self.world.mesh.data_replica(self.world.rank)

    @property
    def sender(self) -> Callable[[Any], Any] | None:
        """The function that brings a batch to this process's devices, where a move is not enough."""
        return None

    @property
    def batch_cutter(self) -> Callable[[Any], Any] | None:
        """The function that makes of a batch this process's part of its sequences; `None` where it has all of them."""
        return self.context.batches.cut if self.context is not None and self.context.cuts_batches else None

    # Choosing

    def use_parallelism(self, config: ParallelismConfig) -> None:
        """Spread the training as a configuration says, whose mesh the world has already; all processes call it."""
        self.parallelism_config = config
        if self.world.device.type != "xla" and self.world.size > 1:
            self.device_mesh = config.get_device_mesh(self.world.device.type)
        if config.cp_handler is not None and config.cp_enabled:
            # not before it is used: it loads what compiles
            from accelerate_nb.runtime.strategies.context_parallel import ContextParallel

            self.context = ContextParallel(self.world, config.cp_handler)

    def choose_precision(self, name: str, options: PrecisionOptions) -> Precision:
        """The precision of a name that `precision_name` returned, in which all steps are computed from now on."""
        self.precision = choose_precision(name, self.world.device, options)
        return self.precision

    # Preparing

    def begin_call(self, call: PrepareCall) -> None:
        """A call of `prepare` begins, with these objects."""

    def prepare(self, requests: Sequence[PrepareRequest]) -> list[Any]:
        """
        The models and optimizers of one call of `prepare`, in their order.

        Where a model's weights are replaced, optimizers are pointed at the new ones: those of the call, whichever stands first, and
        those of earlier calls.
        """
        self.optimizers += [request.value for request in requests if isinstance(request.value, Optimizer)]
        prepared = []
        for request in requests:
            made = request.value
            if isinstance(made, Module):
                before = repoint.named_weights(made)
                made = self.prepare_model(request)
                self._replaced.update(repoint.replaced_weights(before, repoint.named_weights(self.unwrap(made))))
            prepared.append(made)
        for optimizer in self.optimizers if self._replaced else ():
            repoint.repoint(optimizer, self._replaced)
        return prepared

    def prepare_model(self, request: PrepareRequest) -> Module:
        """A model as it is trained: in its precision, on its device, spread over processes, compiled."""
        self.accept(request.value)
        if request.is_placed:
            check_loaded(request.value, self.optimizers, is_trained=request.is_trained)
        model = self.precision.wrap_forward(self.attend_over_parts(request.value))
        if request.is_placed:
            model = self.place(model)
        if request.is_trained:
            model = self.wrap_model(model)
        return self.compile(model, request.compiling)

    def attend_over_parts(self, model: Module) -> Module:
        """The model, whose attention goes over all parts of sequences where processes have parts."""
        return model if self.context is None else self.context.attach(model)

    def accept(self, model: Module) -> None:
        """Raise a `ConfigurationError` for a model that can't be trained on the devices of its weights."""
        check_quantised(model, self.world.device)

    def place(self, model: Module) -> Module:
        """The model on this process's device, unless its weights were put on other devices."""
        return model if has_places(model) else model.to(self.world.device)

    def wrap_model(self, model: Module) -> Module:
        """The model as it is trained."""
        return model

    def compile(self, model: Module, how: TorchDynamoPlugin) -> Module:
        """The model as it is trained, compiled."""
        return how.compiled(model)

    def unwrap(self, model: Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> Any:
        """The model before `prepare`, whose weights have their original names."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def gathered(self, weights: Any, modifier_rank: int | None, forward_module: Any) -> AbstractContextManager[Any]:
        """A block in which weights are whole on every process, as most strategies have them anyway."""
        return nullcontext()

    def replace(self, item: Any) -> Any:
        """What is prepared in the place of an object that is no model and no optimizer: mostly that object."""
        return item

    def wrap_schedule(self, scheduler: Any, optimizers: Sequence[Any]) -> Any:
        """A schedule as it is prepared; `None` for one that moves when its optimizer steps, as most do."""
        return None

    def schedules_of(self, schedulers: Sequence[Any]) -> Sequence[Any]:
        """The prepared schedules that have files of their own in a checkpoint."""
        return schedulers

    # A step

    def backward(self, loss: Tensor, *, steps: int = 1, is_boundary: bool = True, **options: Any) -> None:
        """
        Compute gradients of a loss, divided by the `steps` that a step is made of; `is_boundary` for the last of these.

        `options` are those of `Tensor.backward`; where optimizers update weights in their own backward, `learning_rate` is for them.
        """
        loss = loss if steps == 1 else loss / steps
        if "learning_rate" in options and (fused := self.fused_optimizers):
            if options["learning_rate"] is None:
                raise ConfigurationError(
                    "A learning rate must be passed in order to call backward with LOMO optimizers, but it is None. "
                    "Pass `backward(loss, learning_rate=...)`."
                )
            for optimizer in fused:
                optimizer.fused_backward(loss, options["learning_rate"])
            return
        self.compute_gradients(self.precision.scale(loss), **options)

    def train_step(
        self, model: Module, inputs: Inputs, targets: Any, loss_of: LossOf, *, steps: int = 1, is_boundary: bool = True
    ) -> Tensor:
        """
        Forward and backward of a prepared model's positional and keyword `inputs`; returns the loss, without its graph.

        `loss_of` gets the output and `targets`; a strategy that cuts the batch calls it with parts of both. `steps` and
        `is_boundary` are as in `backward`.
        """
        arguments, keywords = inputs
        loss = loss_of(model(*arguments, **keywords), targets)
        self.backward(loss, steps=steps, is_boundary=is_boundary)
        return loss.detach()

    def compute_gradients(self, loss: Tensor, **options: Any) -> None:
        """The backward of a loss that is divided and scaled."""
        loss.backward(**options)

    @property
    def fused_optimizers(self) -> list[Any]:
        """The prepared optimizers that update weights in a backward of their own, as lomo-optim's do."""
        return [optimizer for optimizer in self.optimizers if is_fused(optimizer)]

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Bring gradients back to their true size, before something reads them."""
        self.precision.unscale(optimizers)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Let an optimizer step; whether it did. One that updates weights in its own backward has nothing left to do."""
        return is_fused(optimizer) or self.precision.step(optimizer, closure)

    def zero_grad(self, optimizer: Optimizer, **options: Any) -> None:
        """Throw an optimizer's gradients away; `options` are those of its `zero_grad`."""
        self.precision.reset(optimizer)
        optimizer.zero_grad(**options)

    @property
    def between_batches(self) -> Callable[[], None] | None:
        """The function that a prepared loader calls before each batch and after the last; `None` for nothing."""
        return None

    def hold_gradients(self, model: Module) -> AbstractContextManager[Any]:
        """A block whose backwards keep their gradients to this process."""
        return nullcontext()

    def send_gradients(self, model: Module) -> AbstractContextManager[Any]:
        """A block whose backward exchanges gradients although the forward was run in `hold_gradients`."""
        return nullcontext()

    def clip_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients down to a norm; returns the norm that they had."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut each gradient at a value."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def settle(self) -> None:
        """Have the device's part of the state computed before it is read, or after it was written; all processes call it."""

    def model_state(self, model: Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The model's complete weights, on the process that saves them."""
        return repoint.original_state(self.unwrap(model)) if unwrap else dict(model.state_dict())

    def load_model_state(self, model: Module, state: dict[str, Any], **options: Any) -> Any:
        """Give a prepared model the weights that `model_state` returned."""
        return repoint.load_original_state(self.unwrap(model), state, **options)

    # Checkpoints

    def weights(self, models: Sequence[Any]) -> list[dict[str, Any]]:
        """The complete weights of each model, as hooks of `save_state` see them, where they are written; all processes call it."""
        seen = models if self.hooks_get_weights else []
        return [complete(self.unwrap(model), self.model_state(model)) for model in seen]

    def files(
        self,
        models: Sequence[Any],
        weights: Sequence[dict[str, Any]],
        optimizers: Sequence[Any],
        *,
        writes_shared: bool,
        safe: bool,
        model_options: Options,
    ) -> list[FileToWrite]:
        """
        The files of models and optimizers that this process has to write; all processes call it.

        `weights` is what hooks have left of it, `writes_shared` whether this process writes what is equal on all, and `safe` whether
        weights are written with safetensors.
        """
        if not writes_shared:
            return []
        named = [(file_names.weights(index, safe=safe), state) for index, state in enumerate(weights)]
        return [
            *files_of(file_names.OPTIMIZER_NAME, optimizers),
            *(file_of_weights(state, name, safe=safe) for name, state in named),
        ]

    def load(
        self, folder: Path, models: Sequence[Any], optimizers: Sequence[Any], options: Options, model_options: Options
    ) -> list[LoadedFile]:
        """
        The content of a checkpoint's files, which models and optimizers get when all of it could be read.

        They are those that `files` made, of this strategy or another.
        """
        if file_names.has_named_states(folder):
            # not before it is used: it takes 0.2 s to load
            from accelerate_nb.runtime.checkpoints import named_states

            return named_states.load(folder, [self.unwrap(model) for model in models], optimizers)
        found = []
        for index, model in enumerate(models):
            path, loaded = load_weights(folder, index)
            receive = partial(self._receive_weights, model, model_options)
            found.append(LoadedFile(path, f"the weights of model {index}", loaded, receive))
        return found + self._loaded_optimizers(folder, models, optimizers, options)

    def window_gradients(self, model: Module) -> dict[str, Tensor]:
        """The gradients that this process has gathered in a window of accumulation that has not ended, by names of weights."""
        if self.gradients_kept_by is not None:
            raise ConfigurationError(
                f"save_state was called inside of a window of accumulation, whose gradients {self.gradients_kept_by} keeps for "
                "itself. Call it after a step, where accelerator.sync_gradients is true."
            )
        named = self.unwrap(model).named_parameters()
        return {repoint.original_name(name): weight.grad for name, weight in named if weight.grad is not None}

    def set_window_gradients(self, model: Module, saved: Mapping[str, Tensor]) -> None:
        """Have the gradients that `window_gradients` returned, and no others."""
        for name, weight in self.unwrap(model).named_parameters():
            gradient = saved.get(repoint.original_name(name))
            weight.grad = None if gradient is None else gradient.to(weight.device)

    def bucket_orders(self, models: Sequence[Any], *, is_collective: bool) -> list[list[int]]:
        """Of each model, the numbers of its weights in the order of gradients' buckets, or nothing; if `is_collective`, all call it."""
        return []

    def set_bucket_orders(self, models: Sequence[Any], orders: Sequence[Sequence[int]]) -> None:
        """Sum gradients in the orders that `bucket_orders` returned on rank 0; all processes call it, the others with any."""

    def _receive_weights(self, model: Any, options: Options, weights: dict[str, Any]) -> None:
        self.load_model_state(model, with_aliases(weights, repoint.original_state(self.unwrap(model))), **options)

    def _loaded_optimizers(
        self, folder: Path, models: Sequence[Any], optimizers: Sequence[Any], options: Mapping[str, Any]
    ) -> list[LoadedFile]:
        """The states of optimizers, from complete files."""
        return read_states(folder, file_names.OPTIMIZER_NAME, optimizers, options)

    def join_uneven(self, joinables: Sequence[Any]) -> AbstractContextManager[Any] | None:
        """A block in which processes may have different numbers of batches; `None` where they always need equally many."""
        return None

    def unshared(self, models: Sequence[Any], learning: Sequence[Tensor]) -> list[str]:
        """Warnings about weights that learn and whose gradients are not shared as they should be; `models` are prepared."""
        return []

    def release(self) -> None:
        """Release what was prepared."""
        self.optimizers.clear()
        self.precision.release()

    def close(self) -> None:
        """The training is over."""
        if self.context is not None:
            self.context.close()


def is_fused(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates weights inside of a backward of its own, as lomo-optim's do; it has no step to make."""
    return hasattr(optimizer, "fused_backward")


# The devices on which a model's weights were put before `prepare`


def devices_of(model: Module) -> set[Any]:
    """The devices that transformers' `device_map` gave a model's weights, or those of its most spread part; empty without a map."""
    return max((set(getattr(module, "hf_device_map", {}).values()) for module in model.modules()), key=len)


def has_places(model: Module) -> bool:
    """Whether a model was loaded with its weights on several devices, offloaded, or quantised onto one, and can't be moved."""
    is_away = any(parameter.is_meta for parameter in model.parameters())
    return _is_quantised(model) or is_away or len(devices_of(model)) > 1


def check_loaded(model: Module, optimizers: Iterable[Optimizer], *, is_trained: bool) -> None:
    """Raise `ConfigurationError` for a model without weights, or whose weights that learn are kept elsewhere by hooks."""
    away = {name: item for name, item in chain(model.named_parameters(), model.named_buffers()) if item.is_meta}
    kept = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for hook in offloading_hooks(module)
        for name, _ in chain(module.named_parameters(), module.named_buffers())
    }
    if empty := [name for name in away if name not in kept]:
        raise ConfigurationError(
            f"prepare was given a {type(model).__name__} without weights: {_shortened(empty)} on the meta device, as init_empty_weights "
            "makes them. Load them first, by load_checkpoint_and_dispatch or `model.load_state_dict(state, assign=True)`; "
            "`to_empty` would leave them random."
        )
    learning = {name: item for name, item in away.items() if item.requires_grad}
    if not learning or not is_trained:
        return
    weights = {id(item) for item in learning.values()}
    changes = any(
        id(item) in weights for optimizer in optimizers for group in optimizer.param_groups for item in group["params"]
    )
    text = (
        f"prepare was given a {type(model).__name__} whose hooks keep weights on the CPU or the disk ({_shortened(list(learning))}), as "
        "those of cpu_offload, disk_offload and dispatch_model do. They are brought for each forward, and no optimizer can change "
        "them. "
    )
    if changes or len(devices_of(model)) < 2:
        raise ConfigurationError(
            f"{text}To train it, load all of it, or use FSDP or DeepSpeed, which offload what learns; `requires_grad_(False)` freezes "
            "weights; `prepare_model(model, evaluation_mode=True)` takes it for inference."
        )
    warn_user(f"{text}These do not learn. For inference, call `prepare_model(model, evaluation_mode=True)`.")


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"


def check_quantised(model: Module, device: torch.device) -> None:
    """Raise a `ConfigurationError` for a model in 8 or 4 bits whose weights can't be trained on their devices."""
    places = {str(device) for device in devices_of(model)}
    if not _is_quantised(model) or not places:
        return
    is_away = "cpu" in places and not (device.type == "cpu" and is_bitsandbytes_multi_backend_available())
    if "disk" in places or is_away:
        raise ConfigurationError(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload: its weights "
            f"lie on {', '.join(sorted(places))}. Load it with all of it on {device}; a newer bitsandbytes trains on a CPU too."
        )
    if len(places) == 1 and not places & {str(device), str(device.index or 0), device.type, "cpu", "disk"}:
        raise ConfigurationError(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than the one "
            f"you're training on: its weights lie on {places.pop()}, and this process works on {device}. Load it with "
            f"device_map={{'': {str(device)!r}}}."
        )


def _is_quantised(model: Module) -> bool:
    return bool(getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False))
