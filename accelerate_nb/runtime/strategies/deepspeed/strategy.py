"""The strategy that trains with DeepSpeed's engine, and the files of its checkpoint under the names that Accelerate gives them."""

import functools
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelerate_nb.devices import async_io
from accelerate_nb.errors import CheckpointError, ConfigurationError, NotYetError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, read, shared_setting
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, VerbatimFile
from accelerate_nb.runtime.compat.dataclasses import AutocastKwargs, DistributedType, DynamoBackend
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.operations.nested import convert_to_fp32, recursively_apply
from accelerate_nb.runtime.parallelism_config import ParallelismConfig
from accelerate_nb.runtime.precision.base import BF16, Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.base import Options, PrepareCall, PrepareRequest, Strategy
from accelerate_nb.runtime.strategies.deepspeed import preparation
from accelerate_nb.runtime.strategies.deepspeed.plugin import DeepSpeedPlugin
from accelerate_nb.runtime.strategies.deepspeed.sequence_parallel import SequenceParallel
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.training.compile import TorchDynamoPlugin, compile_regions_in_place
from accelerate_nb.runtime.training.repoint import original_name
from accelerate_nb.runtime.training.unwrap import ENGINES
from accelerate_nb.runtime.world.world import World

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Plugins = DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin]


class EnginePrecision(BF16):
    """The engine's own type: a model gets its inputs in it, and returns float32, as in other strategies."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.dtype = name, _DTYPES[name]
        super().__init__(device)

    def _check(self) -> None:
        """DeepSpeed says itself whether a device has the type."""

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Nothing to choose: weights are in the type already."""
        return nullcontext()

    def _mixed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def mixed(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = recursively_apply(
                lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor, (args, kwargs)
            )
            return convert_to_fp32(forward(*args, **kwargs))

        return mixed


class DeepSpeed(Strategy):
    """One engine has the model, its optimizer and its schedule; ZeRO's stage decides what of them a process has."""

    # stage 1 cuts what the optimizer remembers, 2 gradients too, 3 weights too; clipping makes the step, which measures the norm

    axes = ("dp_shard", "dp_replicate", "sp")
    # the engine alone knows how to step
    copies_are_whole = False
    hooks_get_weights = False
    gradients_kept_by = "DeepSpeed"
    distributed_type = DistributedType.DEEPSPEED
    optimizer_class = preparation.DeepSpeedOptimizerWrapper
    placeholder_types = (preparation.DummyOptim,)

    def __init__(self, world: World, plugins: Plugins | None = None) -> None:
        super().__init__(world)
        self._package = preparation.load_package(world)
        own = self._package.runtime.lr_schedules
        self.schedule_types = (preparation.DummyScheduler, *(getattr(own, name) for name in own.VALID_LR_SCHEDULES))
        self.deepspeed_plugins: Any = plugins or DeepSpeedPlugin()
        first = next(iter(self._all_plugins))
        if not any(plugin.selected for plugin in self._all_plugins):
            first.select(_from_accelerator_state=True)
        # the engine that trains; a model that is only evaluated has one where its weights are in parts
        self.engine: Any = None
        self._engines: list[Any] = []
        # the first engine, as Accelerate wraps it; `None` before there is one
        self.deepspeed_engine_wrapped: preparation.DeepSpeedEngineWrapper | None = None
        self._call = PrepareCall(())
        self._schedules: dict[int, Any] = {}
        # the optimizer that was given, where the engine has one for host memory in its place
        self._replaced_optimizer: Optimizer | None = None
        self._is_held = False
        # whether gradients wait for the engine's step
        self._is_pending = False
        # where the engine's model has parts of sequences
        self._sequences: SequenceParallel | None = None
        ENGINES.add(self._package.DeepSpeedEngine)

    @property
    def _all_plugins(self) -> list[DeepSpeedPlugin]:
        plugins = self.deepspeed_plugins
        return list(plugins.values()) if isinstance(plugins, Mapping) else [plugins]

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin:
        """The plugin in force."""
        return next(plugin for plugin in self._all_plugins if plugin.selected)

    def use_parallelism(self, config: ParallelismConfig) -> None:
        """Spread the training as a configuration says; a mesh with sequences has the groups that losses are averaged over."""
        super().use_parallelism(config)
        if config.sp_enabled and config.sp_handler is not None:
            names, shape = config._get_mesh()
            self.device_mesh = init_device_mesh(self.world.device.type, shape, mesh_dim_names=names)
            self._sequences = SequenceParallel(self.world, config.sp_handler)

    @property
    def batch_cutter(self) -> Callable[[Any], Any] | None:
        """The function that makes of a batch this process's part of its sequences, where they are split."""
        return None if self._sequences is None else self._sequences.cut

    def choose_precision(self, name: str, options: PrecisionOptions) -> Precision:
        """The precision, which is the configuration's where that has one."""
        if name == "fp8":
            raise NotYetError(
                "mixed_precision='fp8' was requested with DeepSpeed, which is not offered here yet. Use 'bf16'."
            )
        for plugin in self._all_plugins:
            plugin.set_mixed_precision(name)
        # once more with the precision in it
        self.deepspeed_plugin.set_deepspeed_weakref()
        config = self.deepspeed_plugin
        found = next((dtype for dtype in ("fp16", "bf16") if config.get_value(f"{dtype}.enabled") is True), "no")
        if found == "fp16" and not self._computes_in_fp16():
            raise ConfigurationError(
                f"fp16 was requested with DeepSpeed on {self.world.device}, which does not compute in it. Use 'bf16', or 'no'."
            )
        self.precision = Precision() if found == "no" else EnginePrecision(found, self.world.device)
        return self.precision

    def _computes_in_fp16(self) -> bool:
        return bool(self._package.accelerator.get_accelerator().is_fp16_supported())

    # Preparing

    def begin_call(self, call: PrepareCall) -> None:
        """Note what else this call of `prepare` has: the engine is made of all of it."""
        self._call = call

    def prepare(self, requests: Sequence[PrepareRequest]) -> list[Any]:
        """An engine for the model, and its optimizer; a model without one is only evaluated, unless its weights are in parts."""
        models = [request for request in requests if isinstance(request.value, nn.Module)]
        optimizers = [request for request in requests if not isinstance(request.value, nn.Module)]
        is_zero3 = self.deepspeed_plugin.get_value("zero_optimization.stage") == 3
        trained = [request for request in models if request.is_trained and (optimizers or is_zero3)]
        self._check(models, trained, optimizers)
        engine: Any = self._engine(trained[0], optimizers[0].value if optimizers else None) if trained else None
        return [
            engine.optimizer
            if not isinstance(request.value, nn.Module)
            else engine
            if request in trained
            else super(DeepSpeed, self).prepare_model(replace(request, is_trained=False))
            for request in requests
        ]

    def _check(self, models: Sequence[Any], trained: Sequence[Any], optimizers: Sequence[Any]) -> None:
        if self.deepspeed_plugin.get_value("tensor_parallel.autotp_size", 0) > 1:
            raise NotYetError(
                "tensor_parallel.autotp_size was requested in DeepSpeed's configuration, which is not offered here yet. Leave it out; "
                "ParallelismConfig(tp_size=...) splits layers without DeepSpeed."
            )
        if self._sequences is not None and models and not optimizers:
            raise ConfigurationError(
                "A model was given to prepare without an optimizer, but it would get parts of sequences (sp_size), which DeepSpeed "
                "joins for the model of its engine alone. Give it to one call of prepare with its optimizer."
            )
        if len(trained) > 1 or len(optimizers) > 1 or (optimizers and self.engine is not None):
            raise ConfigurationError(
                f"{len(trained) + (self.engine is not None)} models and {len(optimizers)} optimizers were given to one Accelerator "
                "with DeepSpeed, whose engine has one of each. Make an Accelerator for each model; deepspeed_plugins= of the first "
                "names a configuration for each."
            )
        if optimizers and not trained:
            raise ConfigurationError(
                "An optimizer was given to prepare without its model, and DeepSpeed makes one engine of both. Give them to one call "
                "of prepare, with a loader."
            )
        if GradientState().average_over_window:
            raise ConfigurationError(
                "average_over_window=True was requested with DeepSpeed, which has divided the gradients of a window before its "
                "length is known. Leave it out."
            )

    def _engine(self, request: PrepareRequest, optimizer: Any) -> Any:
        plugin, call, state = self.deepspeed_plugin, self._call, GradientState()
        self._check_disk(plugin)
        schedules = self._package.runtime.lr_schedules.VALID_LR_SCHEDULES
        kinds = (LRScheduler, *self.schedule_types)
        scheduler = next((item for item in call.objects if isinstance(item, kinds)), None)
        steps = preparation.choose_accumulation(plugin, state.num_steps)
        state.plugin_kwargs = {**state.plugin_kwargs, "num_steps": steps}
        preparation.check_pair(plugin.deepspeed_config, optimizer, scheduler, schedules)
        if isinstance(optimizer, Optimizer):
            plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
        model: nn.Module = request.value
        plugin.set_moe_leaf_modules(model)
        preparation.fill_in(plugin, call, model, optimizer, scheduler)
        arguments: dict[str, Any] = {"model": self.precision.wrap_forward(model), "config": plugin.deepspeed_config}
        if isinstance(optimizer, preparation.DummyOptim):
            arguments["model_parameters"] = optimizer.params
        elif optimizer is not None:
            offloads = plugin.get_value("zero_optimization.offload_optimizer.device", "none") not in {"none", None}
            if offloads and plugin.get_value("zero_force_ds_cpu_optimizer", True):
                self._replaced_optimizer, optimizer = optimizer, preparation.map_pytorch_optim_to_deepspeed(optimizer)
            arguments["optimizer"] = optimizer
        # the engine calls what makes a schedule, and leaves one of torch's to its owner
        of_engine = getattr(scheduler, "lr_scheduler_callable", scheduler)
        if of_engine is not scheduler or type(scheduler).__name__ in schedules:
            arguments["lr_scheduler"] = of_engine
        if self._sequences is not None:
            arguments["mpu"] = self._sequences.register(model, plugin.get_value("train_micro_batch_size_per_gpu"))
        engine, _, _, schedule = self._package.initialize(**arguments)
        self._engines.append(engine)
        self.deepspeed_engine_wrapped = self.deepspeed_engine_wrapped or preparation.DeepSpeedEngineWrapper(engine)
        if optimizer is not None or (self.engine is None and "optimizer" in plugin.deepspeed_config):
            self.engine = engine
        if self._sequences is not None:
            self._sequences.average_over_all(engine)
        if scheduler is not None and schedule is not None:
            self._schedules[id(scheduler)] = schedule
        self._compile(engine, request.compiling)
        return engine

    def _check_disk(self, plugin: DeepSpeedPlugin) -> None:
        """Raise `ConfigurationError` where a configuration has weights or states of an optimizer on a disk, and they can't be there."""
        optimizer, weights = (
            plugin.get_value(f"zero_optimization.offload_{part}.device") == "nvme" for part in ("optimizer", "param")
        )
        if (optimizer or weights) and (complaint := async_io.missing_library()):
            raise ConfigurationError(complaint)
        has_16_bits = any(plugin.get_value(f"{dtype}.enabled") is True for dtype in ("bf16", "fp16"))
        if weights and not has_16_bits and not self._computes_in_fp16():
            # zero.Init._set_dtype (0.19.8): `dtype or float16 if is_fp16_supported() else bfloat16`
            raise ConfigurationError(
                "Offload of weights in 32 bits to NVMe was requested on a device without fp16, where DeepSpeed writes them in bf16 "
                "all the same. Pass mixed_precision='bf16', or offload_param_device='cpu'."
            )

    def _compile(self, engine: Any, how: TorchDynamoPlugin) -> None:
        arguments = how.to_kwargs()
        if how.backend == DynamoBackend.NO:
            return
        if how.use_regional_compilation:
            compile_regions_in_place(engine.module, **arguments)
        else:
            engine.compile(backend=arguments.pop("backend"), compile_kwargs=arguments)

    def wrap_schedule(self, scheduler: Any, optimizers: Sequence[Any]) -> Any:
        """The schedule that the engine moves itself, as it is prepared; `None` for one that moves with the optimizer."""
        schedule = self._schedules.get(id(scheduler))
        return None if schedule is None else preparation.DeepSpeedSchedulerWrapper(schedule, optimizers)

    def schedules_of(self, schedulers: Sequence[Any]) -> list[Any]:
        """Those that the engine does not save itself."""
        return [item for item in schedulers if not isinstance(item, preparation.DeepSpeedSchedulerWrapper)]

    # A step

    def backward(self, loss: Tensor, *, steps: int = 1, is_boundary: bool = True, **options: Any) -> None:
        """Compute gradients; the engine exchanges them as its stage has it."""
        engine = self.engine
        if engine is None:
            raise ConfigurationError(
                "backward was called, but DeepSpeed has no model with an optimizer. Give both to one call of prepare."
            )
        if self._is_pending:
            # nobody stepped: as with Accelerate, whose backward makes the step
            self._step()
        is_boundary = is_boundary and not self._is_held
        engine.set_gradient_accumulation_boundary(is_boundary)
        # a caller who has divided the loss says so as to the engine, as transformers' Trainer does
        divides = options.pop("scale_wrt_gas", True) and steps > 1
        engine.backward(loss / steps if divides else loss, scale_wrt_gas=False, **options)
        self._is_pending = is_boundary

    def _step(self) -> None:
        self._is_pending = False
        self.engine.step()

    def step(self, optimizer: Optimizer, closure: Any) -> bool:
        """Let the engine step, unless it did when gradients were clipped; whether it did."""
        if closure is not None:
            raise ConfigurationError("step(closure) was called, and DeepSpeed steps once a backward. Call step().")
        if self._is_pending:
            self._step()
        return not getattr(optimizer, "overflow", False)

    @contextmanager
    def hold_gradients(self, model: nn.Module) -> Iterator[None]:
        """A block whose backwards are no end of a window of accumulation."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def clip_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Have the engine step with gradients scaled down to a norm; returns the norm that they had, or the last step's."""
        if norm_type != 2:
            raise ConfigurationError(
                f"norm_type={norm_type} was requested, but DeepSpeed measures norm 2. Leave it out."
            )
        engine = self.engine
        if engine is None or not hasattr(engine.optimizer, "clip_grad"):
            # stage 0 in 32 bits has torch's gradients
            return super().clip_norm(parameters, max_norm, norm_type)
        if self._is_pending:
            limit = engine.optimizer.clip_grad
            engine.optimizer.clip_grad = min(max_norm, limit) if limit else max_norm
            try:
                self._step()
            finally:
                engine.optimizer.clip_grad = limit
        norm = engine.get_global_grad_norm()
        return torch.as_tensor(0.0 if norm is None else norm, device=self.world.device)

    def clip_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Refuse: the engine scales gradients down to a norm alone."""
        raise ConfigurationError("DeepSpeed and FSDP do not support `clip_grad_value_`. Use `clip_grad_norm_` instead.")

    # Weights and checkpoints

    def gathered(self, weights: Any, modifier_rank: int | None, forward_module: Any) -> AbstractContextManager[Any]:
        """A block, entered by all processes, in which weights of stage 3 are whole; changes of `modifier_rank` alone are kept."""
        return self._package.zero.GatheredParameters(  # type: ignore[no-any-return]  # the package has no types
            weights, modifier_rank=modifier_rank, fwd_module=forward_module
        )

    def model_state(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete weights; of stage 3 on each machine's first process, and an empty dictionary on the others."""
        state = _complete_state(self.unwrap(model), self.world.is_local_main)
        return {original_name(name): item for name, item in state.items()}

    def files(
        self, models: Sequence[Any], weights: Any, optimizers: Sequence[Any], *, model_options: Options, **how: Any
    ) -> list[FileToWrite]:
        """The files of this process for its engines, under Accelerate's names; `model_options` are of their `save_checkpoint`."""
        found: list[FileToWrite] = []
        for index, engine in _training_engines(models):
            with TemporaryDirectory() as folder, _collecting(engine) as collector:
                engine.save_checkpoint(folder, _tag(index), **model_options)
                root = Path(folder)
                found += [
                    FileToWrite(str(path.relative_to(root)), content) for path, content in collector.saved.items()
                ]
                # which of several is the newest, and DeepSpeed's scripts
                others = [path for path in sorted(root.rglob("*")) if path.is_file()]
                found += [VerbatimFile(str(path.relative_to(root)), path.read_bytes()) for path in others]
        return found

    def load(
        self, folder: Path, models: Sequence[Any], optimizers: Sequence[Any], options: Options, model_options: Options
    ) -> list[LoadedFile]:
        """Engines' states, by other numbers of processes in DeepSpeed's universal form; `model_options` are of `load_checkpoint`."""
        return [self._load(folder, index, engine, model_options) for index, engine in _training_engines(models)]

    def _load(self, folder: Path, index: int, engine: Any, options: Mapping[str, Any]) -> LoadedFile:
        tag = _tag(index)
        # what this process reads, as far as it is there; all of it where another number of processes wrote it
        found = sorted((folder / tag).glob("*_states.pt"))
        own = f"zero_pp_rank_{engine.global_rank}_"
        needed = [path for path in found if "zero_pp_rank_" not in path.name or own in path.name] or found[:1]
        states = {path: _read_part(path) for path in needed}
        weights = next((state for path, state in states.items() if path.name.endswith("model_states.pt")), None)
        if weights is None:
            raise CheckpointError(
                f"{folder / tag} holds no states of a model, and {_EXPECTED} was expected there. Load a folder that was saved with "
                "DeepSpeed, or train without it."
            )
        is_otherwise = engine.zero_optimization() and int(weights["dp_world_size"]) != engine.seq_dp_world_size

        def receive(content: dict[Path, Any]) -> None:
            if is_otherwise:
                with _converted(self.world, folder, tag, engine._config) as other, _collecting(engine):
                    engine.load_checkpoint(str(other), tag, **options)
            else:
                with _collecting(engine, content):
                    engine.load_checkpoint(str(folder), tag, **options)
            if self._replaced_optimizer is not None:
                # loading made new groups, and a schedule changes those of the optimizer that it was given
                self._replaced_optimizer.param_groups = self.engine.optimizer.param_groups

        return LoadedFile(folder / tag, f"the engine of model {index}", states, receive)

    def set_window_gradients(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        """Have no gradients, as after a step."""

    def release(self) -> None:
        """Release the engines."""
        super().release()
        for engine in self._engines:
            engine.destroy()
        self._engines.clear()
        self.engine, self.deepspeed_engine_wrapped, self._is_pending = None, None, False
        if self._sequences is not None:
            self._sequences.release()
        self._schedules.clear()

    def close(self) -> None:
        """The training is over."""
        super().close()
        self.release()
        for plugin in self._all_plugins:
            plugin.unselect()


def _complete_state(model: nn.Module, is_local_main: bool) -> dict[str, Any]:
    """Copies of complete weights and buffers, on the CPU; of weights in parts on a machine's first process. All processes call it."""
    from deepspeed.runtime.zero import GatheredParameters

    own = model.state_dict(keep_vars=True)
    # which a weight has that is in parts
    is_kept = is_local_main or not any(hasattr(weight, "ds_id") for weight in own.values())
    # a weight with two names is one tensor, as in Accelerate's stage 3
    copies: dict[int, Any] = {}
    # one module whole at a time
    for _, group in itertools.groupby(own, lambda name: name.rpartition(".")[0]):
        weights = [own[name] for name in group]
        with GatheredParameters(weights):
            for weight in weights if is_kept else ():
                if id(weight) not in copies:
                    copies[id(weight)] = weight.detach().to("cpu", copy=True) if isinstance(weight, Tensor) else weight
    return {name: copies[id(weight)] for name, weight in own.items()} if is_kept else {}


_EXPECTED = "a part of DeepSpeed's engine"


def _tag(index: int) -> str:
    """The folder of a model's engine."""
    return f"{file_names.MODEL_NAME}_{index}" if index else file_names.MODEL_NAME


@dataclass(eq=False)
class _Collector:
    """An engine's way to its files: keeps what is saved for the checkpoint's writer, and reads data, never code."""

    _original: Any
    _read_before: Mapping[Path, Any]
    saved: dict[Path, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def commit(self, _info: Any) -> bool:
        """The writer commits."""
        return True

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a file's content."""
        self.saved[Path(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of a file."""
        found = Path(path)
        return self._read_before[found] if found in self._read_before else _read_part(found, map_location)


@contextmanager
def _collecting(engine: Any, read_before: Mapping[Path, Any] | None = None) -> Iterator[_Collector]:
    before, engine.checkpoint_engine = engine.checkpoint_engine, _Collector(engine.checkpoint_engine, read_before or {})
    try:
        yield engine.checkpoint_engine
    finally:
        engine.checkpoint_engine = before


def _training_engines(models: Sequence[Any]) -> list[tuple[int, Any]]:
    """The engines that train, by their numbers; DeepSpeed gives one without an optimizer nothing that saves."""
    return [(i, model) for i, model in enumerate(models) if getattr(model, "checkpoint_engine", None) is not None]


def _read_part(path: Path, map_location: Any = None) -> Any:
    """The content of one of an engine's files."""
    with _harmless():
        return read(path, _EXPECTED, map_location=map_location or "cpu")


@shared_setting
def _harmless() -> Any:
    """A block in which the types that an engine saves beside tensors may be read."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])


@contextmanager
def _converted(world: World, folder: Path, tag: str, config: Any) -> Iterator[Path]:
    """A folder beside `folder` with its engine in the universal form, as which it is loaded in the block; all processes enter it."""
    other = folder.with_name(f".{folder.name}.universal")
    complaint = _convert(folder / tag, other / tag) if world.is_main else None
    before, config.load_universal_checkpoint = config.load_universal_checkpoint, True
    try:
        complaint = next((text for text in gather_object([complaint]) if text is not None), None)
        if complaint is not None:
            raise CheckpointError(complaint)
        yield other
    finally:
        config.load_universal_checkpoint = before
        world.barrier()
        if world.is_main:
            shutil.rmtree(other, ignore_errors=True)


def _convert(source: Path, target: Path) -> str | None:
    """Convert with DeepSpeed's own script; returns what went wrong."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return None
    last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
    return (
        f"{source} was saved by another number of processes, and DeepSpeed could not convert it to its universal form ({last}). "
        "It converts what Adam and AdamW remember. Load it with as many processes as saved it."
    )
