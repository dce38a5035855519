"""The conversion of a torch loader into the loader of a process among others."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.dataclasses import RNGType, named
from accelerate_nb.runtime.data import sharding
from accelerate_nb.runtime.data.adapter import DataLoaderAdapter, loader_arguments
from accelerate_nb.runtime.data.dispatcher import DataLoaderDispatcher
from accelerate_nb.runtime.data.shard import DataLoaderShard
from accelerate_nb.runtime.world.registry import current_world


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """
    A loader of the same data that gives this process its part of every epoch, on `device` with `put_on_device`.

    Each process reads its own batches: every `num_processes`-th, or its part of each with `split_batches`. With
    `dispatch_batches`, which iterable data sets default to, the main process reads for all. What does not divide is filled up
    with samples from the beginning (`even_batches`), unless the loader has `drop_last`. `rng_types` are the generators that
    are made equal when an epoch begins. Processes that have one copy of the model together, by the axes `tp`, `cp` and `sp` of
    `torch_device_mesh`, read the same batches.

    >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=1)
    >>> list(loader)
    [tensor([2, 3]), tensor([1, 2])]
    """
    iterable = isinstance(dataloader.dataset, IterableDataset)
    dispatch = put_on_device and iterable if dispatch_batches is None else dispatch_batches
    if dispatch and not put_on_device:
        raise ConfigurationError("Using `dispatch_batches=True` requires `put_on_device=True`. Pass both, or neither.")
    world = current_world() if num_processes is None or process_index is None or dispatch else None
    processes = world.size if num_processes is None and world is not None else num_processes or 1
    index = world.rank if process_index is None and world is not None else process_index or 0
    of_copy = sharding.processes_of_copy(torch_device_mesh)
    processes, index = processes // of_copy, index // of_copy
    if split_batches:
        size = dataloader.batch_size or getattr(sharding.index_source(dataloader), "batch_size", None)
        sharding.check_divides(size, processes)

    seedable: sharding.SeedableRandomSampler | None = None
    if use_seedable_sampler and isinstance(sampler := sharding.get_sampler(dataloader), RandomSampler):
        seedable = sharding.SeedableRandomSampler(
            sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator, data_seed=data_seed
        )
    options: dict[str, Any] = {
        **loader_arguments(dataloader),
        "use_stateful_dataloader": use_stateful_dataloader,
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
    }
    prepared: DataLoaderDispatcher | DataLoaderShard
    if dispatch:
        del options["generator"]
        prepared = DataLoaderDispatcher(
            dataloader.dataset,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            torch_device_mesh=torch_device_mesh,
            **_loader_options(dataloader),
            **options,
        )
    else:
        dataset, loader_options = _share(dataloader, processes, index, split_batches, even_batches)
        generator = None if seedable is not None else _synchronized_generator(dataloader, processes, split_batches)
        if rng_types is not None and generator is None:
            rng_types = [rng_type for rng_type in rng_types if named(rng_type) != "generator"]
        prepared = DataLoaderShard(
            dataset,
            device=device if put_on_device else None,
            rng_types=None if rng_types is None else list(rng_types),
            synchronized_generator=generator,
            **loader_options,
            **options,
        )
    if seedable is not None:
        prepared.set_sampler(seedable)
    prepared.is_shared = processes * of_copy > 1
    return prepared


def _share(
    dataloader: DataLoader[Any], processes: int, index: int, split_batches: bool, even_batches: bool
) -> tuple[Any, dict[str, Any]]:
    """One process's share of the data that every process reads, with the arguments for their order and for its batches."""
    dataset, size, options = dataloader.dataset, dataloader.batch_size, _loader_options(dataloader)
    if processes == 1:
        return dataset, options
    if not isinstance(dataset, IterableDataset):
        name = "batch_sampler" if "batch_sampler" in options else "sampler"
        options[name] = sharding.BatchSamplerShard(options[name], processes, index, split_batches, even_batches)
        return dataset, options
    if not split_batches and _parts(dataset) >= processes:
        sharded: Any = dataset
        return sharded.shard(num_shards=processes, index=index), options
    if split_batches and size is not None:
        options["batch_size"] = size // processes
    return sharding.IterableDatasetShard(dataset, size, dataloader.drop_last, processes, index, split_batches), options


def _synchronized_generator(dataloader: DataLoader[Any], processes: int, split_batches: bool) -> torch.Generator | None:
    """The generator that has to be equal on all processes, if there is one."""
    if processes == 1:
        return None
    dataset: Any = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        sharded_by_itself = not split_batches and _parts(dataset) >= processes
        return None if sharded_by_itself else _torch_generator(dataset)
    found = sharding.get_sampler(dataloader)
    sampler: Any = dataloader.sampler if found is None else found
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        # drawn here, from torch's global generator, whatever is drawn later depends on the same seed on every process
        sampler.generator = sharding.new_generator()
        sampler.generator.manual_seed(sharding.drawn_seed())
    return _torch_generator(sampler)


def _torch_generator(owner: Any) -> torch.Generator | None:
    """The generator of a sampler or a data set, where it is one whose state can be sent; numpy's goes by the same name."""
    found = getattr(owner, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _loader_options(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments for a loader's order and batch size."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {"sampler": dataloader.sampler, "batch_size": None}
    return {"batch_sampler": dataloader.batch_sampler}


def _parts(dataset: Any) -> int:
    """The number of parts in which a data set can be read; 0 where it can't read a single part."""
    return int(getattr(dataset, "n_shards", 0)) if hasattr(dataset, "shard") else 0


def _stateful_class(loader_class: type) -> type[Any]:
    from accelerate_nb.runtime.data.torchdata import stateful

    return stateful(loader_class)


# set from outside, since torchdata's loaders are subclasses of the adapter
DataLoaderAdapter.stateful_class = staticmethod(_stateful_class)
