"""The base of this package's loaders for torch, torchdata and gradient accumulation."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.training.accumulation import GradientState

# The arguments of a loader, besides its data and their order.
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class DataLoaderStateMixin:
    """The attributes that `GradientState` reads of the active loader."""

    end_of_dataloader: bool = False
    remainder: int = -1
    gradient_state: GradientState
    # the axes, besides those of data, along which ranks read different batches
    more_axes: tuple[str, ...] = ()

    def reset(self) -> None:
        """Nothing has been read."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Reading begins."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Reading has ended, in whatever way."""
        self.gradient_state._remove_dataloader(self)


class DataLoaderAdapter(DataLoader[Any]):
    """
    A torch loader; with `use_stateful_dataloader` one that is a torchdata `StatefulDataLoader` as well.

    `MissingExtraError`, which is an `ImportError`, where torchdata is requested and not installed.
    """

    # The class of loaders of a kind that are torchdata's too; `prepare.py` sets it, since those are subclasses of this one.
    stateful_class: ClassVar[Callable[[type], type[Any]]]

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        if use_stateful_dataloader:
            # before torch's constructor runs, so that torchdata's runs in its place
            self.__class__ = type(self).stateful_class(type(self))
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # Accelerate's name for the torch loader inside, which is this one
            return self
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def state_dict(self) -> dict[str, Any]:
        """The state of torchdata at the current batch; `StateError` without `use_stateful_dataloader`."""
        return self._torchdata("state_dict")  # type: ignore[no-any-return]  # torchdata's own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration goes on where `state_dict` was taken; `StateError` without `use_stateful_dataloader`."""
        self._torchdata("load_state_dict", state_dict)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Nothing to adjust: what `state_dict` returns was taken when its batch was."""

    def _torchdata(self, name: str, *arguments: Any) -> Any:
        inner = getattr(super(), name, None)
        if inner is None:
            raise StateError(
                f"{name} was called on a {type(self).__name__}, but torch's own loader keeps no state. "
                "Make it with use_stateful_dataloader=True."
            )
        return inner(*arguments)


def loader_arguments(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments for a loader that loads in the same way: with the same workers, into the same memory."""
    arguments = {name: getattr(dataloader, name) for name in _KEPT if hasattr(dataloader, name)}
    if dataloader.pin_memory_device:
        arguments["pin_memory_device"] = dataloader.pin_memory_device
    return arguments
