"""The results of all processes for a batch, with as many rows as it has samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.data.dispatcher import is_column
from accelerate_nb.runtime.data.prepared_loader import PreparedLoader
from accelerate_nb.runtime.data.sharding import LastStep
from accelerate_nb.runtime.operations import collective
from accelerate_nb.runtime.operations.nested import is_namedtuple, is_record, leaves_of, mapped, with_leaves
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.world.registry import along
from accelerate_nb.runtime.world.world import DATA_AXES
from accelerate_nb.user_warnings import warn_user


def gather_for_metrics(data: Any, gradients: GradientState, *, as_objects: bool = False) -> Any:
    """Every process's `data`, joined; at the end of a loader as many rows as its last step has samples that are not repeated."""
    # Tensors are joined along dimension 0, columns of other things to one list, and anything else to a list with one entry a process.
    # Where not all is tensors, a list is a column of samples, which may hold tensors; with `as_objects` all of `data` is one. Rows are
    # cut where there is one for each sample of the last step or of a full one, as in `loss.repeat(batch_size)`, so that a short last
    # batch weighs what it holds. Anything else is kept whole, with a warning where samples were repeated.
    loader = gradients.active_dataloader
    # ranks that work on the same samples, as parts of one model, count once: unless the loader gives them different batches
    axes = (*DATA_AXES, *loader.more_axes) if isinstance(loader, PreparedLoader) else DATA_AXES
    world = along(axes)
    step_size = loader.step_size if isinstance(loader, PreparedLoader) else None
    last_step_cut = LastStepCut(_last_step(gradients), step_size, world.size)
    if world.size == 1:
        return last_step_cut.of_process(data, as_objects=as_objects)
    if as_objects:
        rows = _as_rows(data)
        return last_step_cut.of_objects(collective.gather_object([rows], axis=axes))
    is_column = _columns_of(data)
    leaves = leaves_of(data, is_column, records=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    objects = [_as_rows(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
    gathered = collective.gather(tensors, axis=axes) if tensors else []
    joined_tensors = iter([last_step_cut.of_rows(*pair) for pair in zip(tensors, gathered, strict=True)])
    others = collective.gather_object([objects], axis=axes) if objects else []
    if len(set(counts := list(map(len, others)))) > 1:
        raise OperationError(
            f"gather_for_metrics was given {counts} things by the processes, in their order. Pass the same nest on all of them."
        )
    joined_objects = iter([last_step_cut.of_objects(values) for values in zip(*others, strict=True)])
    joined = (next(joined_tensors) if isinstance(leaf, Tensor) else next(joined_objects) for leaf in leaves)
    return with_leaves(data, joined, is_column, records=True)


def check_gather(data: Any, gradients: GradientState) -> None:
    """Warn where `gather` joins samples of a loader's last step, some of which are repeated."""
    loader = gradients.active_dataloader
    if not (isinstance(loader, PreparedLoader) and gradients.end_of_dataloader):
        return
    last = loader.last_step
    share = 0 if last is None or last.whole else last.dealt // along((*DATA_AXES, *loader.more_axes)).size
    # one row may be a number of each process
    if share > 1 and any(
        isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == share for leaf in leaves_of(data, records=True)
    ):
        loader.warn_of_repeated()


def _columns_of(data: Any) -> Callable[[Any], bool]:
    """The function that recognises a column of samples in `data`: lists of tensors alone are none where all is tensors (as Accelerate)."""
    return is_column if all(isinstance(leaf, Tensor) for leaf in leaves_of(data)) else _is_column_of_samples


def _is_column_of_samples(data: Any) -> bool:
    """Whether it is a list or a tuple of one thing a sample, which may hold tensors."""
    if is_column(data):
        return True
    if isinstance(data, list):
        # not a batch as `default_collate` makes it of tuples: some tensors, and some things that hold others
        others = [item for item in data if not isinstance(item, Tensor)]
        return not 0 < len(others) < len(data) or not all(
            isinstance(item, (list, tuple, Mapping)) and item for item in others
        )
    if not isinstance(data, tuple) or is_namedtuple(data):
        return False
    # mappings with the same keys, or instances of one class with fields, as collate functions of detection give their samples
    first = data[0]
    if isinstance(first, Mapping):
        return all(isinstance(item, Mapping) and item.keys() == first.keys() for item in data)
    return (is_record(first) or is_namedtuple(first)) and all(type(item) is type(first) for item in data)


@dataclass(eq=False)
class _SingleObject:
    """One thing of a process, which is no sample."""

    value: Any


def _as_rows(data: Any) -> list[Any] | _SingleObject:
    """The samples that something holds."""
    return list(data) if _has_rows(data) else _SingleObject(data)


def _has_rows(data: Any) -> bool:
    return isinstance(data, (list, tuple)) or (isinstance(data, (Tensor, np.ndarray)) and data.ndim > 0)


class LastStepCut:
    """The cut of an epoch's last step, which removes repeated samples; other steps are left whole."""

    def __init__(self, last: LastStep | None, step_size: int | None, processes: int) -> None:
        self.last = last
        self.share = 0 if last is None or last.whole else last.dealt // processes
        # how many samples a process, or all of them, have in a full step
        self.full = set() if step_size is None else {step_size, step_size // processes}

    def of_process(self, data: Any, *, as_objects: bool) -> Any:
        """The data of the only process: the same nest, with fewer rows where they are samples."""
        if self.last is None or self.last.whole:
            return data
        return self._real_rows(data) if as_objects else mapped(self._real_rows, data, _columns_of(data), records=True)

    def _real_rows(self, data: Any) -> Any:
        assert self.last is not None
        return data[: self.last.real] if _has_rows(data) and self._fits([len(data)]) else data

    def of_rows(self, local: Tensor, gathered: Tensor) -> Tensor:
        """The gathered rows of a tensor that are no repeated samples."""
        if self.last is None:
            return gathered
        if self.last.whole:
            return gathered[: self.last.real * (local.shape[0] if local.ndim > 0 else 1)]
        if local.ndim == 0:
            return gathered  # a number of each process
        return gathered[: self.last.real] if self._are_samples([len(local)]) else gathered

    def of_objects(self, gathered: Sequence[Any]) -> list[Any]:
        """The things of all processes in one list, without those of repeated samples."""
        if self.last is not None and self.last.whole:
            gathered = gathered[: self.last.real]
        if any(isinstance(rows, _SingleObject) for rows in gathered):
            return [rows.value if isinstance(rows, _SingleObject) else rows for rows in gathered]
        joined = [value for rows in gathered for value in rows]
        if self.last is None or self.last.whole or not self._are_samples(list(map(len, gathered))):
            return joined
        return joined[: self.last.real]

    def _fits(self, lengths: list[int]) -> bool:
        """Whether there are as many rows on each process as samples, in this step or in a full one."""
        rows = set(lengths)
        return self.share == 0 or rows == {self.share} or (len(rows) == 1 and rows <= self.full)

    def _are_samples(self, lengths: list[int]) -> bool:
        assert self.last is not None
        if self._fits(lengths):
            return True
        if any(lengths) and self.last.repeated > 0:
            warn_user(
                f"{self.last.repeated} of {self.last.dealt} samples of the loader's last step are repeated ones, "
                f"but gather_for_metrics was given {lengths[0]} rows for the {self.share} samples of a process: all were kept. "
                "Pass one row a sample; a single number of each process goes without dimensions."
            )
        return False


def _last_step(gradients: GradientState) -> LastStep | None:
    """The real part of the current step, where it is an epoch's last or was filled up; `None` for a full one."""
    loader = gradients.active_dataloader
    if isinstance(loader, PreparedLoader):
        loader.warned_of_repeated |= loader.end_of_dataloader
        return loader.filled_step
    # a loader of another library that gives the number of samples left, and no more
    return LastStep(loader.remainder, 0) if gradients.end_of_dataloader and loader.remainder > 0 else None
