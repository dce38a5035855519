"""What all processes computed for a batch, without the samples that were repeated to even it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from accelerate_nb.errors import OperationError
from accelerate_nb.notices import notice
from accelerate_nb.runtime.accumulation import GradientState
from accelerate_nb.runtime.current import current_world
from accelerate_nb.runtime.data.batches import is_column, leaves_of, with_leaves
from accelerate_nb.runtime.data.reading import PreparedLoader
from accelerate_nb.runtime.data.sharding import LastStep
from accelerate_nb.runtime.operations import collective


def gather_for_metrics(data: Any, gradients: GradientState, *, as_objects: bool = False) -> Any:
    """
    Every process's `data`, joined; at the end of a loader without what was repeated in its last step.

    Tensors are joined along dimension 0, columns of other things to one list, and anything else to a list with one entry a
    process; they may be nested in lists, tuples, mappings or data classes, which keep their form. With `as_objects` all of
    `data` is one list of samples. What has not one row a sample is kept whole, with a warning. In one process `data` itself.
    """
    world = current_world()
    if world.size == 1:
        return data
    ending = Ending(_last_step(gradients), world.size)
    if as_objects:
        rows = _as_rows(data)
        return ending.of_objects(collective.gather_object([rows]))
    leaves = leaves_of(data)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return with_leaves(data, iter(_joined_objects(leaves, ending)))
    tensors = iter(_joined_tensors([leaf for leaf in leaves if isinstance(leaf, Tensor)], ending))
    objects = iter(_joined_objects([leaf for leaf in leaves if not isinstance(leaf, Tensor)], ending))
    return with_leaves(data, (next(tensors if isinstance(leaf, Tensor) else objects) for leaf in leaves))


def _joined_tensors(tensors: list[Tensor], ending: Ending) -> list[Tensor]:
    return [ending.of_rows(mine, all_) for mine, all_ in zip(tensors, collective.gather(tensors), strict=True)]


def _joined_objects(objects: list[Any], ending: Ending) -> list[list[Any]]:
    if not objects:
        return []
    everyones = collective.gather_object([[_as_rows(one) for one in objects]])
    counts = [len(each) for each in everyones]
    if len(set(counts)) > 1:
        raise OperationError(
            f"gather_for_metrics was given {counts} things by the processes, in their order. Pass the same nest on all of them."
        )
    return [ending.of_objects(each) for each in zip(*everyones, strict=True)]


class _Single:
    """One thing of a process, which is no sample."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing


def _as_rows(data: Any) -> list[Any] | _Single:
    """The samples that something holds."""
    if is_column(data) or isinstance(data, (list, tuple)):
        return list(data)
    if isinstance(data, (Tensor, np.ndarray)) and data.ndim > 0:
        return list(data)
    return _Single(data)


class Ending:
    """What of an epoch's last step is left out; nothing of any other step."""

    def __init__(self, last: LastStep | None, processes: int) -> None:
        self.last = last
        self.share = 0 if last is None or last.whole else last.dealt // processes

    def of_rows(self, mine: Tensor, gathered: Tensor) -> Tensor:
        """The gathered rows of a tensor that are no repeated samples."""
        if self.last is None:
            return gathered
        if self.last.whole:
            return gathered[: self.last.real * (mine.shape[0] if mine.ndim > 0 else 1)]
        if mine.ndim == 0:
            return gathered  # a number of each process
        return gathered[: self.last.real] if self._are_samples([len(mine)]) else gathered

    def of_objects(self, everyones: Sequence[Any]) -> list[Any]:
        """The things of all processes in one list, without those of repeated samples."""
        if self.last is not None and self.last.whole:
            everyones = everyones[: self.last.real]
        if any(isinstance(each, _Single) for each in everyones):
            return [each.thing if isinstance(each, _Single) else each for each in everyones]
        joined = [thing for each in everyones for thing in each]
        if self.last is None or self.last.whole or not self._are_samples([len(each) for each in everyones]):
            return joined
        return joined[: self.last.real]

    def _are_samples(self, lengths: list[int]) -> bool:
        assert self.last is not None
        if self.share == 0 or set(lengths) == {self.share}:
            return True
        if any(lengths):
            notice(
                f"{self.last.dealt - self.last.real} of {self.last.dealt} samples of the loader's last step are repeated ones, "
                f"but gather_for_metrics was given {lengths[0]} rows for the {self.share} samples of a process: all were kept. "
                "Pass one row a sample; a single number of each process goes without dimensions."
            )
        return False


def _last_step(gradients: GradientState) -> LastStep | None:
    """What is repeated in the batch at hand; `None` for nothing."""
    loader = gradients.active_dataloader
    if not gradients.end_of_dataloader:
        return None
    if not isinstance(loader, PreparedLoader):
        # a loader of somebody else's that says how many samples are left, and no more
        return LastStep(loader.remainder, 0) if loader.remainder > 0 else None
    loader.told_of_repeated = True
    if loader.last_step is None and loader.may_repeat_unseen:
        notice(
            "The last batch may hold repeated samples, and gather_for_metrics can't tell them: the data set says no length, and "
            "is read by worker processes. Give it a `__len__`, or pass num_workers=0 or drop_last=True to the loader."
        )
    return loader.last_step
