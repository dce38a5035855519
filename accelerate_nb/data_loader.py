"""The import path `accelerate.data_loader`: prepared loaders under Hugging Face's module name."""

from accelerate_nb.runtime.data.adapter import (
    DataLoaderAdapter as DataLoaderAdapter,
    DataLoaderStateMixin as DataLoaderStateMixin,
)
from accelerate_nb.runtime.data.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
from accelerate_nb.runtime.data.prepare import prepare_data_loader as prepare_data_loader
from accelerate_nb.runtime.data.prepared_loader import (
    SkipBatchSampler as SkipBatchSampler,
    SkipDataLoader as SkipDataLoader,
    skip_first_batches as skip_first_batches,
)
from accelerate_nb.runtime.data.shard import DataLoaderShard as DataLoaderShard
from accelerate_nb.runtime.data.sharding import (
    BatchSamplerShard as BatchSamplerShard,
    IterableDatasetShard as IterableDatasetShard,
    SeedableRandomSampler as SeedableRandomSampler,
    get_sampler as get_sampler,
)
from accelerate_nb.runtime.xla.loader import MpDeviceLoaderWrapper as MpDeviceLoaderWrapper
