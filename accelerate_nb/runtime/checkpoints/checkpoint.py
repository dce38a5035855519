"""A training's complete state in one folder, in the files that Accelerate writes and reads."""

import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerate_nb.devices.xla import random_state, set_random_state
from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import file_names, manifest
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, device_of, loaded_into, read, read_states
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, file_of_weights, files_of, write_files
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.training.prepared import PreparedObjects
from accelerate_nb.runtime.world.state import PartialState
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user

Hook = Callable[..., None]


def rank_files(
    rank: int, step: int, loaders: Iterable[Any], bucket_orders: Sequence[Sequence[int]] = ()
) -> list[FileToWrite]:
    """The files of a process's own state: its random numbers and micro-steps, and where its loaders stand."""
    state = {"step": step, **random_states(), "bucket_orders": bucket_orders}
    positions = [loader.position() for loader in loaders if hasattr(loader, "position")]
    return [
        FileToWrite(file_names.of_rank(file_names.RNG_STATE_NAME, rank), state),
        FileToWrite(file_names.of_rank(file_names.POSITIONS_NAME, rank), positions),
    ]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One training, as something that can be written to a folder and read from one."""

    world: World
    bundle: PreparedObjects
    strategy: Strategy
    precision: Precision
    on_each_node: bool = False

    @property
    def writes(self) -> bool:
        """Whether this process writes what is equal on all."""
        return self.world.is_local_main if self.on_each_node else self.world.is_main

    def files(
        self,
        draft: Path,
        step: int,
        *,
        safe: bool,
        is_collective: bool = True,
        in_window: bool = False,
        hooks: tuple[Hook, ...] = (),
        model_options: Mapping[str, Any],
    ) -> list[FileToWrite]:
        """The files that this process has to write, with the training's own tensors in them; if `is_collective`, all call it."""
        self.strategy.settle()
        weights = self.strategy.weights(self.bundle.models)
        for hook in hooks:
            hook(self.bundle.models, weights, str(draft))
        files = self.strategy.files(
            self.bundle.models,
            weights,
            self.bundle.optimizers,
            writes_shared=self.writes,
            safe=safe,
            model_options=model_options,
        )
        files += self._shared() if self.writes else []
        bucket_orders = self.strategy.bucket_orders(self.bundle.models, is_collective=is_collective)
        files += rank_files(self.world.rank, step, self.bundle.loaders, bucket_orders)
        if in_window:  # gradients are being accumulated, and belong to the state of each process
            gradients = [self.strategy.window_gradients(model) for model in self.bundle.models]
            files.append(FileToWrite(file_names.of_rank(file_names.GRADIENTS_NAME, self.world.rank), gradients))
        return files

    def load(
        self,
        folder: Path,
        *,
        hooks: tuple[Hook, ...] = (),
        map_location: str | None = None,
        load_options: Mapping[str, Any] | None = None,
        **model_options: Any,
    ) -> int | None:
        """Read everything back; returns the count of micro-steps where this process's own file has it."""
        options = {"map_location": device_of(map_location, self.world.device), **(load_options or {})}
        manifest.check(folder, names=())
        # a model that a hook takes out of the list is loaded by that hook
        offered = self.bundle.models if self.strategy.hooks_get_weights else []
        models = [*offered]
        for hook in hooks:
            hook(models, str(folder))
        models = models if offered else list(self.bundle.models)
        with self._read_by_all(), ThreadPoolExecutor(1, thread_name_prefix="accelerate_nb checkpoint") as pool:
            checked = pool.submit(self._check, folder)
            found = self.strategy.load(folder, models, self.bundle.optimizers, options, model_options)
            found += self._states(folder, options)
            random_path = folder / file_names.of_rank(file_names.RNG_STATE_NAME, self.world.rank)
            random_file = _random_file(random_path) if random_path.exists() else None
            if random_file is None:
                warn_user(
                    f"{random_path} does not exist: the checkpoint was written by fewer processes than there are now "
                    f"({self.world.size}). Random numbers go on from where they are, and the count of micro-steps from zero."
                )
            gradients_path = folder / file_names.of_rank(file_names.GRADIENTS_NAME, self.world.rank)
            gradients: list[dict[str, Tensor]] = [{}] * len(self.bundle.models)
            if gradients_path.exists():
                gradients = read(gradients_path, "the gradients of a window of accumulation")
            positions = self._read_positions(folder, options)
            # those of stateful loaders are where Accelerate has written them, too
            for index, loader in () if positions else self._stateful():
                path = folder / file_names.numbered(file_names.LOADER_NAME, index)
                if path.exists():
                    only = {"weights_only": options.get("weights_only", True)}
                    found.append(loaded_into(loader, path, "the state of a loader", only))
            checked.result()
        # until here nothing has changed: a checkpoint that can't be read leaves the training as it is
        for item in found:
            item.give()
        for loader, position in zip(self.bundle.loaders, positions, strict=False):
            loader.resume(position)
        # before there are gradients, which DDP would have moved into its buckets
        states = random_file.content if random_file is not None and isinstance(random_file.content, dict) else {}
        self.strategy.set_bucket_orders(self.bundle.models, states.get("bucket_orders", ()))
        for model, saved in zip(self.bundle.models, gradients, strict=False):
            self.strategy.set_window_gradients(model, saved)
        self.strategy.settle()
        if random_file is not None:
            random_file.give()
        return states.get("step")

    @contextmanager
    def _read_by_all(self) -> Iterator[None]:
        """A block that ends well on all processes or on none, where each has parts of the weights: no others' parts are changed."""
        if self.strategy.copies_are_whole:
            yield
            return
        failure: CheckpointError | ConfigurationError | None = None
        try:
            yield
        except (CheckpointError, ConfigurationError) as error:
            failure = error
        failures = gather_object([None if failure is None else str(failure)])
        if failure is not None:
            raise failure
        first = next((text for text in failures if text is not None), None)
        if first is not None:
            raise CheckpointError(first)

    def _check(self, folder: Path) -> None:
        # what all read alike is read through by one process of each machine
        rank_file = re.compile(rf".*_{self.world.rank}\.pkl")
        content = manifest.read(folder)
        rank_files = None if content is None else [name for name in content["files"] if rank_file.fullmatch(name)]
        manifest.check(folder, None if self.world.is_local_main else rank_files)

    def _states(self, folder: Path, options: Mapping[str, Any]) -> list[LoadedFile]:
        elsewhere = {name: value for name, value in options.items() if name != "map_location"}
        found = read_states(folder, file_names.SCHEDULER_NAME, self._schedulers, elsewhere)
        scaler, path = self.precision.scaler, folder / file_names.SCALER_NAME
        if scaler is not None and not path.exists() and manifest.read(folder) is None:
            # Accelerate has no scaler on a CPU
            warn_user(f"{path} does not exist, so the gradient scaler starts from its initial state.")
        elif scaler is not None:
            found.append(loaded_into(scaler, path, "the state of the gradient scaler", {}))
        saved = [path for path in folder.iterdir() if re.fullmatch(rf"{file_names.CUSTOM_NAME}_\d+\.pkl", path.name)]
        if len(saved) != len(self.bundle.custom):
            raise CheckpointError(
                f"Number of custom checkpoints in folder {folder} does not match the number of registered objects:\n"
                f"\tFound checkpoints: {len(saved)}\n\tRegistered objects: {len(self.bundle.custom)}\n"
                "Call register_for_checkpointing with the same objects as when it was saved."
            )
        for index, custom in enumerate(self.bundle.custom):
            path, expected = folder / f"{file_names.CUSTOM_NAME}_{index}.pkl", f"the state of registered object {index}"
            found.append(loaded_into(custom, path, expected, {"weights_only": options.get("weights_only", True)}))
        return found

    @property
    def _schedulers(self) -> Sequence[Any]:
        return self.strategy.schedules_of(self.bundle.schedulers)

    def _shared(self) -> list[FileToWrite]:
        stated = [(file_names.numbered(file_names.LOADER_NAME, index), loader) for index, loader in self._stateful()]
        if self.precision.scaler is not None:
            stated.append((file_names.SCALER_NAME, self.precision.scaler))
        stated += [(f"{file_names.CUSTOM_NAME}_{index}.pkl", item) for index, item in enumerate(self.bundle.custom)]
        files = files_of(file_names.SCHEDULER_NAME, self._schedulers)
        return files + [FileToWrite(name, item.state_dict()) for name, item in stated]

    def _stateful(self) -> list[tuple[int, Any]]:
        """The loaders of which Accelerate keeps a state too, by their number among all."""
        numbered = enumerate(self.bundle.loaders)
        return [(index, item) for index, item in numbered if getattr(item, "use_stateful_dataloader", False)]

    def _read_positions(self, folder: Path, options: Mapping[str, Any]) -> list[Any]:
        # where there were fewer processes, a rank without a file goes on from where rank 0 stood, as the others do
        paths = [folder / file_names.of_rank(file_names.POSITIONS_NAME, rank) for rank in (self.world.rank, 0)]
        path = next((path for path in paths if path.exists()), None)
        if path is None:
            return []  # Accelerate writes none: the next epoch begins at its beginning
        positions: list[Any] = read(
            path, "the positions of the loaders", weights_only=options.get("weights_only", True)
        )
        if len(positions) == len(self.bundle.loaders):
            return positions
        warn_user(
            f"{path} holds the positions of {len(positions)} loaders, but {len(self.bundle.loaders)} are prepared; all of "
            "them begin at their beginning. Prepare the same loaders as when it was saved."
        )
        return []


def _random_file(path: Path) -> LoadedFile:
    expected = "the random states of a process"
    return LoadedFile(path, expected, read(path, expected), _restore_random_states)


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, under the names that Accelerate gives them."""
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    if torch.xpu.is_available():
        states["torch_xpu_manual_seed"] = torch.xpu.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["torch_mps_manual_seed"] = torch.mps.get_rng_state()
    if (state := random_state()) is not None:
        states["xm_seed"] = state
    return states


def _restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore every generator that `random_states` kept and that this process has."""
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    modules: list[Any] = [torch.cuda, torch.xpu]
    for module, name in zip(modules, ("torch_cuda_manual_seed", "torch_xpu_manual_seed"), strict=True):
        # a checkpoint from a machine with more devices than this one has states that this one does not need
        count = module.device_count() if module.is_available() else 0
        for index, state in enumerate(states.get(name, ())[:count]):
            module.set_rng_state(state, index)
    if "torch_mps_manual_seed" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["torch_mps_manual_seed"])
    set_random_state(states.get("xm_seed"))


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """
    Write these states to a folder, as they come: shared ones on the main process, its own on each; returns the folder.

    It is what `Accelerator.save_state` is made of, without its draft: a kill leaves some of the files.
    """
    folder, state = Path(output_dir), PartialState()
    folder.mkdir(parents=True, exist_ok=True)
    files: list[FileToWrite] = []
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        files += [
            file_of_weights(weights, file_names.weights(index, safe=safe_serialization), safe=safe_serialization)
            for index, weights in enumerate(model_states)
        ]
        files += files_of(file_names.OPTIMIZER_NAME, optimizers) + files_of(file_names.SCHEDULER_NAME, schedulers)
        if scaler is not None:
            files.append(FileToWrite(file_names.SCALER_NAME, scaler.state_dict()))
    write_files(files + rank_files(process_index, step, dataloaders), folder)
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Read what `save_accelerator_state` wrote, here or with Accelerate; returns the `Accelerator`'s attributes to be set."""
    folder = Path(input_dir)
    options = {"map_location": device_of(map_location, PartialState().device), **(load_kwargs or {})}
    found = Strategy(PartialState().world).load(folder, models, optimizers, options, load_model_func_kwargs)
    found += read_states(folder, file_names.SCHEDULER_NAME, schedulers, options)
    if scaler is not None:
        found.append(loaded_into(scaler, folder / file_names.SCALER_NAME, "the state of the gradient scaler", {}))
    for item in found:
        item.give()
    positions = folder / file_names.of_rank(file_names.POSITIONS_NAME, process_index)
    if positions.exists():
        resumable = [loader for loader in dataloaders if hasattr(loader, "resume")]
        for loader, position in zip(resumable, read(positions, "the positions of the loaders"), strict=False):
            loader.resume(position)
    states = _random_file(folder / file_names.of_rank(file_names.RNG_STATE_NAME, process_index))
    states.give()
    return {"step": states.content["step"]} if "step" in states.content else {}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object to `custom_checkpoint_{index}.pkl` in a folder, on the main process."""
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        write_files([FileToWrite(f"{file_names.CUSTOM_NAME}_{index}.pkl", obj.state_dict())], Path(path))


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Give an object the state that `save_custom_state` wrote; only plain values and tensors are made of it."""
    file = Path(path) / f"{file_names.CUSTOM_NAME}_{index}.pkl"
    loaded_into(obj, file, f"the state of registered object {index}", {}).give()
