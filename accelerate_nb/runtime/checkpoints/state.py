"""A training's complete state in one folder, in the files that Accelerate writes and reads."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.bundle import Bundle
from accelerate_nb.runtime.checkpoints import names
from accelerate_nb.runtime.checkpoints.folders import write_file, written_whole
from accelerate_nb.runtime.checkpoints.randomness import random_states, restore_random_states
from accelerate_nb.runtime.checkpoints.weights import load_weights, save_weights, with_aliases
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.world import World

Hook = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One training, as something that can be written to a folder and read from one."""

    world: World
    bundle: Bundle
    strategy: Strategy
    precision: Precision
    on_each_node: bool = False

    def save(
        self, folder: Path, step: int, *, safe: bool, in_window: bool = False, hooks: tuple[Hook, ...] = ()
    ) -> None:
        """
        Write everything; all processes call it, and it is done on all when it returns.

        `in_window` says that gradients are being accumulated: they belong to the state of each process.
        """
        with written_whole(folder, self.world) as draft:
            weights = [self.strategy.model_state(model) for model in self.bundle.models]
            for hook in hooks:
                hook(self.bundle.models, weights, str(draft))
            if self._writes:
                self._save_shared(draft, weights, safe=safe)
            self._save_own(draft, step)
            if in_window:
                _write(self._gradients(), draft / names.of_rank(names.GRADIENTS_NAME, self.world.rank))

    def load(
        self,
        folder: Path,
        *,
        hooks: tuple[Hook, ...] = (),
        map_location: str | None = None,
        load_options: Mapping[str, Any] | None = None,
        **model_options: Any,
    ) -> int | None:
        """Read everything back; returns the count of micro-steps where this process's own file tells it."""
        device = str(self.world.device) if map_location == "on_device" else map_location or "cpu"
        models = list(self.bundle.models)
        for hook in hooks:
            hook(models, str(folder))
        for index, model in enumerate(models):
            own = self.strategy.unwrap(model).state_dict()
            self.strategy.load_model_state(
                model, with_aliases(load_weights(folder, index, device), own), **model_options
            )
        options = dict(load_options or {})
        for index, optimizer in enumerate(self.bundle.optimizers):
            optimizer.load_state_dict(
                _read(folder / names.numbered(names.OPTIMIZER_NAME, index), map_location=device, **options)
            )
        for index, scheduler in enumerate(self.bundle.schedulers):
            scheduler.load_state_dict(_read(folder / names.numbered(names.SCHEDULER_NAME, index), **options))
        if self.precision.scaler is not None:
            self.precision.scaler.load_state_dict(_read(folder / names.SCALER_NAME))
        self._load_custom(folder)
        self._load_positions(folder)
        self._load_gradients(folder)
        return self._load_random(folder)

    @property
    def _writes(self) -> bool:
        """Whether this process writes what is equal on all."""
        return self.world.is_local_main if self.on_each_node else self.world.is_main

    def _save_shared(self, folder: Path, weights: list[dict[str, Any]], *, safe: bool) -> None:
        for index, state in enumerate(weights):
            save_weights(state, folder / names.weights(index, safe=safe), safe=safe)
        for index, optimizer in enumerate(self.bundle.optimizers):
            _write(optimizer.state_dict(), folder / names.numbered(names.OPTIMIZER_NAME, index))
        for index, scheduler in enumerate(self.bundle.schedulers):
            _write(scheduler.state_dict(), folder / names.numbered(names.SCHEDULER_NAME, index))
        if self.precision.scaler is not None:
            _write(self.precision.scaler.state_dict(), folder / names.SCALER_NAME)
        for index, custom in enumerate(self.bundle.custom):
            _write(custom.state_dict(), folder / f"{names.CUSTOM_NAME}_{index}.pkl")

    def _save_own(self, folder: Path, step: int) -> None:
        rank = self.world.rank
        _write({"step": step, **random_states()}, folder / names.of_rank(names.RNG_STATE_NAME, rank))
        _write(
            [loader.position() for loader in self.bundle.loaders], folder / names.of_rank(names.POSITIONS_NAME, rank)
        )

    def _load_custom(self, folder: Path) -> None:
        found = [each for each in folder.iterdir() if re.fullmatch(rf"{names.CUSTOM_NAME}_\d+\.pkl", each.name)]
        if len(found) != len(self.bundle.custom):
            raise CheckpointError(
                f"Number of custom checkpoints in folder {folder} does not match the number of registered objects:\n"
                f"\tFound checkpoints: {len(found)}\n\tRegistered objects: {len(self.bundle.custom)}\n"
                "Call register_for_checkpointing with the same objects as when it was saved."
            )
        for index, custom in enumerate(self.bundle.custom):
            # a person's own object may hold anything, so this one file is trusted
            path = folder / f"{names.CUSTOM_NAME}_{index}.pkl"
            custom.load_state_dict(torch.load(path, map_location="cpu", weights_only=False))

    def _load_positions(self, folder: Path) -> None:
        # where there were fewer processes, a rank without a file goes on from where rank 0 stood, as the others do
        own, first = (folder / names.of_rank(names.POSITIONS_NAME, rank) for rank in (self.world.rank, 0))
        path = own if own.exists() else first
        if not path.exists():
            return  # Accelerate writes none: the next epoch begins at its beginning
        positions = _read(path)
        if len(positions) != len(self.bundle.loaders):
            warnings.warn(
                f"{path} tells where {len(positions)} loaders stood, but {len(self.bundle.loaders)} are prepared; all of "
                "them begin at their beginning. Prepare the same loaders as when it was saved.",
                stacklevel=4,
            )
            return
        for loader, position in zip(self.bundle.loaders, positions, strict=True):
            loader.resume(position)

    def _gradients(self) -> list[dict[str, Tensor]]:
        return [
            {name: each.grad for name, each in self._parameters(model) if each.grad is not None}
            for model in self.bundle.models
        ]

    def _load_gradients(self, folder: Path) -> None:
        path = folder / names.of_rank(names.GRADIENTS_NAME, self.world.rank)
        saved: list[dict[str, Tensor]] = _read(path) if path.exists() else [{}] * len(self.bundle.models)
        for model, gradients in zip(self.bundle.models, saved, strict=False):
            for name, parameter in self._parameters(model):
                gradient = gradients.get(name)
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _parameters(self, model: Module) -> Iterator[tuple[str, Parameter]]:
        named: Iterator[tuple[str, Parameter]] = self.strategy.unwrap(model).named_parameters()
        return named

    def _load_random(self, folder: Path) -> int | None:
        path = folder / names.of_rank(names.RNG_STATE_NAME, self.world.rank)
        if not path.exists():
            warnings.warn(
                f"{path} does not exist: the checkpoint was written by fewer processes than there are now ({self.world.size})."
                " Random numbers go on from where they are, and the count of micro-steps from zero.",
                stacklevel=4,
            )
            return None
        states = _read(path)
        restore_random_states(states)
        step: int | None = states.get("step")
        return step


def _write(value: Any, path: Path) -> None:
    write_file(path, lambda file: torch.save(value, file))


def _read(path: Path, **options: Any) -> Any:
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist. Prepare the same objects as when the checkpoint was saved, or choose another folder."
        )
    options.setdefault("map_location", "cpu")
    options.setdefault("weights_only", True)
    with torch.serialization.safe_globals(_numpy_state()):
        return torch.load(path, **options)


def _numpy_state() -> list[Any]:
    """What the state of numpy's generator is made of; torch must be told that these are harmless."""
    core = getattr(np, "_core", None) or np.core  # numpy 1 has it under its old name
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), type(np.dtype(np.int64))]
