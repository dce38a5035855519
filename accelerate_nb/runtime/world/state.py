"""The state of this process, and of its `Accelerator`, under Hugging Face's names."""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accelerate_nb.errors import ConfigurationError, NotYetError, StateError
from accelerate_nb.runtime.compat.dataclasses import DistributedType, InitProcessGroupKwargs
from accelerate_nb.runtime.compat.env_vars import LauncherSettings, parse_flag_from_env
from accelerate_nb.runtime.precision.base import precision_name
from accelerate_nb.runtime.world import registry
from accelerate_nb.runtime.world.registry import Rendezvous, SharedState, current_world
from accelerate_nb.runtime.world.world import World
from accelerate_nb.runtime.xla.device import is_requested

_F = TypeVar("_F", bound=Callable[..., Any])


class ProcessMethods:
    """The properties of a process that knows its `world`, and its actions in step with the others."""

    @property
    def world(self) -> World:
        """This process among the others: ranks, devices, groups."""
        raise NotImplementedError

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """The process's rank among all."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """The process's rank on its machine."""
        return self.world.local_rank

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.world.device

    @property
    def distributed_type(self) -> DistributedType:
        """The type of connection between the processes."""
        return DistributedType.of(self.world.size, self.world.device.type)

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world.size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.world.is_last

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        # a process that goes on alone, to save for example, must not begin what all devices have to compute together
        self.world.settle()
        registry.reconnect()
        self.world.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """
        `print` once on each machine.

        On XLA devices, values that are still to be computed are printed in a later step, as they were when this was called, and what
        is printed after them waits behind them: Python's own `print(loss)` would have the step cut in two to know the value at once.
        """
        prints = self.world.is_local_main
        # where only some ranks print, the others take part in what it needs
        self.world.when_computed(lambda values: print(*values, **kwargs) if prints else None, list(args))

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A block that the main process runs before all others."""
        yield from self._goes_first(self.world.is_main)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """A block that the first process of each machine runs before the others."""
        yield from self._goes_first(self.world.is_local_main)

    def _goes_first(self, first: bool) -> Iterator[None]:
        registry.reconnect()
        if not first:
            self.world.barrier()
        try:
            yield
        finally:
            # also when the block fails: the others would wait for ever for one that will not come
            if first:
                self.world.barrier()

    def on_main_process(self, function: _F | None = None) -> Any:
        """A decorator: the function runs on the main process and does nothing elsewhere."""
        return self._only(lambda world: world.is_main, function)

    def on_local_main_process(self, function: _F | None = None) -> Any:
        """A decorator: the function runs on the first process of each machine and does nothing elsewhere."""
        return self._only(lambda world: world.is_local_main, function)

    def on_last_process(self, function: _F | None = None) -> Any:
        """A decorator: the function runs on the last process and does nothing elsewhere."""
        return self._only(lambda world: world.is_last, function)

    def on_process(self, function: _F | None = None, process_index: int | None = None) -> Any:
        """A decorator: the function runs on the process of this rank and does nothing elsewhere."""
        return self._only(lambda world: world.rank == process_index or world.size == 1, function)

    def on_local_process(self, function: _F | None = None, local_process_index: int | None = None) -> Any:
        """A decorator: the function runs on the process of this rank on each machine and does nothing elsewhere."""
        return self._only(lambda world: world.local_rank == local_process_index or world.size == 1, function)

    def _only(self, chosen: Callable[[World], bool], function: _F | None) -> Any:
        if function is None:
            return functools.partial(self._only, chosen)

        @functools.wraps(function)
        def perhaps(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if chosen(self.world) else None

        return perhaps

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """
        The process's part of `inputs`: a list, tuple, tensor, data set, or a dictionary of equally long ones.

        The first processes get one more where it doesn't divide; with `apply_padding` the last element is repeated so that
        all parts are equally long.

        >>> with accelerator.split_between_processes(["a", "b", "c"]) as mine:  # doctest: +SKIP
        ...     print(mine)
        """
        world = self.world
        if world.size == 1:
            yield inputs
            return
        is_mapping = isinstance(inputs, Mapping)
        lengths = {str(name): len(values) for name, values in inputs.items()} if is_mapping else {"": len(inputs)}
        if len(set(lengths.values())) > 1:
            raise ConfigurationError(
                f"A dictionary is split along its values, which must be equally long, but their lengths are {lengths}."
            )
        part, extra = divmod(next(iter(lengths.values()), 0), world.size)
        start = world.rank * part + min(world.rank, extra)
        end = start + part + (1 if world.rank < extra else 0)
        missing = part + (1 if extra else 0) - (end - start) if apply_padding else 0
        yield _part(inputs, start, end, missing, world.device if apply_padding else None)


class PartialState(ProcessMethods):
    """The process without an `Accelerator`: every instance shows the same attributes; the first one joins the world."""

    _shared_state = SharedState()

    _cpu: bool
    debug: bool
    fork_launched: bool

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            return
        launcher_settings = LauncherSettings.read(os.environ)
        world = join(cpu=cpu or launcher_settings.cpu, **options)
        # a process that joins drops its former generation, and what its instances share
        self.__dict__ = self._shared_state
        self.__dict__.update(_cpu=cpu or launcher_settings.cpu, debug=launcher_settings.debug, _world=world)
        self.fork_launched = parse_flag_from_env("FORK_LAUNCHED")

    @property
    def initialized(self) -> bool:
        """Whether some instance was made since the last reset."""
        return "_world" in self.__dict__

    @property
    def world(self) -> World:
        """This process among the others: ranks, devices, groups."""
        return known(self, "_world")  # type: ignore[no-any-return]  # kept in a dictionary

    @property
    def distributed_type(self) -> DistributedType:
        """The type of connection between the processes, or an assigned label, which changes nothing in the training."""
        assigned = self.__dict__.get("_distributed_type")
        return assigned or self._of_strategy("distributed_type") or super().distributed_type

    @distributed_type.setter
    def distributed_type(self, distributed_type: DistributedType | str) -> None:
        self.__dict__["_distributed_type"] = DistributedType(distributed_type)

    def _of_strategy(self, name: str) -> Any:
        strategy = self.__dict__.get("strategy")
        return None if strategy is None else getattr(strategy, name)

    @property
    def backend(self) -> str | None:
        """The backend that connects the processes; `None` for one alone."""
        return self.world.backend

    @property
    def default_device(self) -> torch.device:
        """The kind of device that is taken by default."""
        if is_requested(os.environ):
            return torch.device("xla")
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu" if found is None else found.type)

    def set_device(self) -> None:
        """Make the process's device torch's current one."""
        if self.device.type not in ("cpu", "mps", "xla") and self.device.index is not None:
            torch.accelerator.set_device_index(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """End a process group; without one named, leave the world."""
        if group is None:
            registry.forget()
        elif torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(group)

    @staticmethod
    def _reset_state() -> None:
        PartialState._shared_state.clear()
        registry.rediscover()

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


def join(
    cpu: bool = False,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    rank: int = -1,
    world_size: int = -1,
    **others: Any,
) -> World:
    """The world, joined as these arguments say where it isn't joined yet; -1 is the number that the launcher gave."""
    if unknown := others.keys() - {"pg_options", "device_id"}:
        known = ", ".join([*InitProcessGroupKwargs().to_dict(), "rank", "world_size", "pg_options", "device_id"])
        raise ConfigurationError(f"{', '.join(unknown)} can't be given to the process group. Known names are {known}.")
    world = current_world(Rendezvous(cpu, backend, init_method, timeout, others))
    for name, requested, found in (("rank", rank, world.rank), ("world_size", world_size, world.size)):
        if requested not in {-1, found}:
            raise ConfigurationError(
                f"{name}={requested} was requested, but this is rank {world.rank} of {world.size}, which the launcher has numbered. "
                f"Leave {name} out."
            )
    if cpu and world.device.type != "cpu":
        raise StateError(
            f"cpu=True was requested, but this process works on {world.device} already. "
            "Pass cpu=True where the first Accelerator or PartialState is made, or call `end_training()` before."
        )
    return world


def known(state: PartialState, name: str) -> Any:
    """A state's attribute; `AttributeError` says what to do where it was reset."""
    value = state.__dict__.get(name)
    if value is None:
        raise AttributeError(
            f"`{type(state).__name__}` object has no attribute `{name.lstrip('_')}`. This happens if "
            f"`{type(state).__name__}._reset_state()` was called and an `Accelerator` or `PartialState` was not reinitialized."
        )
    return value


# Attributes that the strategy answers for, unless they were assigned; `None` where there is no strategy.
_OF_STRATEGY = (
    *("deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin"),
    *("parallelism_config", "device_mesh"),
)


class AcceleratorState(PartialState):
    """The process with what its `Accelerator` chose: every instance shows the same attributes."""

    _shared_state = SharedState()

    _mixed_precision: str
    dynamo_plugin: Any
    strategy: Any

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **options: Any,
    ) -> None:
        refused = {
            "deepspeed_plugin": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
        }
        if given := [name for name, value in refused.items() if value is not None]:
            raise NotYetError(f"{type(self).__name__}({given[0]}=...) is not offered here yet. Leave it out.")
        partial = PartialState(cpu, **options)
        self.__dict__ = self._shared_state
        first = "_mixed_precision" not in self.__dict__
        if first and not _from_accelerator:
            raise StateError(
                "AcceleratorState() was requested before there was an Accelerator. "
                "Make one first: `accelerator = Accelerator()`; for the process alone use `PartialState()`."
            )
        self.__dict__.update(partial.__dict__)
        if first:
            self.__dict__.update(strategy=None, dynamo_plugin=None)
        if dynamo_plugin is not None:
            self.dynamo_plugin = dynamo_plugin
        if first or mixed_precision is not None:
            self._mixed_precision = precision_name(mixed_precision or LauncherSettings.read(os.environ).mixed_precision)

    @property
    def initialized(self) -> bool:
        """Whether some instance was made since the last reset."""
        return "_mixed_precision" in self.__dict__

    @property
    def mixed_precision(self) -> str:
        """The name of the numbers that a step is computed in."""
        return known(self, "_mixed_precision")  # type: ignore[no-any-return]  # kept in a dictionary

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded by the second version of FSDP."""
        return bool(self._of_strategy("is_fsdp2"))

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin of DeepSpeed in force; `None` without DeepSpeed."""
        return self._of_strategy("deepspeed_plugin")

    def __getattr__(self, name: str) -> Any:
        # what was assigned is found before; other names raise what they raised
        return self._of_strategy(name) if name in _OF_STRATEGY else object.__getattribute__(self, name)

    def __getstate__(self) -> dict[str, Any]:
        # the strategy holds what belongs to this process
        label = {"_distributed_type": self.distributed_type} if "_world" in self.__dict__ else {}
        return {**self.__dict__, "strategy": None, **label}

    def get_deepspeed_plugin(self, name: str) -> Any:
        """One of several plugins of DeepSpeed; `ConfigurationError` where there is none of this name."""
        plugins = self.deepspeed_plugins
        named = plugins if isinstance(plugins, Mapping) else {}
        if name not in named:
            known = ", ".join(map(repr, named)) or (
                "one without a name" if plugins else "none, since this run doesn't use DeepSpeed"
            )
            raise ConfigurationError(f"The DeepSpeed plugin {name!r} was requested; there are {known}. Leave it out.")
        return named[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Put one of several plugins of DeepSpeed in force; `ConfigurationError` where there is none of this name."""
        chosen = self.get_deepspeed_plugin(str(name))
        for plugin in self.deepspeed_plugins.values():
            plugin.unselect()
        chosen.select(_from_accelerator_state=True)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        text = PartialState.__repr__(self) + f"\nMixed precision type: {self.mixed_precision}\n"
        plugin = self.deepspeed_plugin
        return text if plugin is None else f"{text}ds_config: {plugin.deepspeed_config}\n"


def is_initialized() -> bool:
    """Whether an `Accelerator` was made in this process."""
    return bool(AcceleratorState._shared_state)


def _part(values: Any, start: int, end: int, missing: int, device: torch.device | None) -> Any:
    if isinstance(values, Mapping):
        return {name: _part(value, start, end, missing, device) for name, value in values.items()}
    if isinstance(values, torch.Tensor):
        part = values[start:end]
        part = torch.cat([part, values[-1:].expand(missing, *values.shape[1:])]) if missing else part
        return part if device is None else part.to(device)
    if isinstance(values, list):
        return [*values[start:end], *values[-1:] * missing]
    if isinstance(values, tuple):
        return (*values[start:end], *values[-1:] * missing)
    datasets = sys.modules.get("datasets")  # its data sets exist only where it has been imported
    if datasets is not None and isinstance(values, datasets.Dataset):
        return values.select([*range(start, end), *[len(values) - 1] * missing])
    return values


# Processes whose rank such launchers do not set: those of `torch.multiprocessing.start_processes`.
_NEED_A_RANK = ("GPU", "MLU", "MUSA", "NPU", "XPU", "CPU", "NEURON")


class PrepareForLaunch:
    """
    A function as `torch.multiprocessing.start_processes` calls it, with the process's index first.

    The index becomes `LOCAL_RANK` and `RANK`, from `NPROC` and `NODE_RANK`, in runs of several devices; with `debug` the
    rendezvous uses the file that `ACCELERATE_DEBUG_RDV_FILE` names.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: DistributedType | str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        if self.debug:
            size = int(os.environ["WORLD_SIZE"])
            store = dist.FileStore(os.environ["ACCELERATE_DEBUG_RDV_FILE"], size)
            dist.init_process_group("gloo", rank=index, store=store, world_size=size)
        elif self.distributed_type.value.removeprefix("MULTI_") in _NEED_A_RANK:
            before = int(os.environ.get("NPROC", "1")) * int(os.environ.get("NODE_RANK", "0"))
            os.environ.update(LOCAL_RANK=str(index), RANK=str(before + index))
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)


def test_launch() -> None:
    """Join the world, to see that it can be joined."""
    PartialState()
