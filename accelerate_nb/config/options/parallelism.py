"""The degrees of a `ParallelismConfig`, under the keys of Accelerate's files."""

import math
from collections.abc import Mapping
from typing import Any

from accelerate_nb.config.options.entries import Entries, Entry
from accelerate_nb.config.value_types import Boolean, Integer, OneOf, Text

_PREFIX = "parallelism_config_"
# Has an `Accelerator` read these degrees.
VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"


def _entry(name: str, value_type: Any, default: Any = None, launched: Any = None) -> tuple[str, Entry]:
    return _PREFIX + name, Entry(value_type, (_PREFIX + name).upper(), launched, default)


# Accelerate's launcher sets no variable of a split that is not requested.
_KNOWN = dict([
    _entry("dp_replicate_size", Integer(1), 1, launched=1),
    _entry("dp_shard_size", Integer(1), 1, launched=1),
    _entry("tp_size", Integer(1), 1, launched=1),
    _entry("cp_size", Integer(1), 1, launched=1),
    _entry("cp_backend", OneOf(("torch",)), "torch", launched="torch"),
    _entry("cp_comm_strategy", OneOf(("allgather", "alltoall")), "allgather"),
    _entry("sp_size", Integer(1), 1, launched=1),
    _entry("sp_backend", OneOf(("deepspeed",)), "deepspeed", launched="deepspeed"),
    _entry("sp_seq_length", Integer(1)),
    _entry("sp_seq_length_is_variable", Boolean(), True),
    _entry("sp_attn_implementation", Text()),
    # not of Accelerate
    _entry("tp_loss_parallel", Boolean(), False),
    _entry("cp_attention", OneOf(("ring", "heads")), "ring"),
    _entry("pp_size", Integer(1), 1),
    _entry("pp_schedule", Text(), "1F1B"),
    _entry("pp_num_microbatches", Integer(1)),
])  # fmt: skip
DEGREES = Entries(prefix=_PREFIX, known=_KNOWN)
_OF_A_SPLIT = ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")


def variables(degrees: Mapping[str, Any]) -> dict[str, str]:
    """The variables through which an `Accelerator` gets these degrees, as Accelerate's launcher sets them."""
    unused = () if "sp" in sizes(degrees) else _OF_A_SPLIT
    used = {name: value for name, value in degrees.items() if name.removeprefix(_PREFIX) not in unused}
    return {VARIABLE: "true", **DEGREES.variables(used)}


def sizes(degrees: Mapping[str, Any]) -> dict[str, int]:
    """The degrees above 1, by the names of their axes: `{'dp_shard': 4}`."""
    found = {name.removeprefix(_PREFIX).removesuffix("_size"): degree for name, degree in degrees.items()}
    return {
        axis: found[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp") if found.get(axis, 1) > 1
    }


def processes(degrees: Mapping[str, Any]) -> int:
    """The number of processes that the degrees take; 1 where none is above 1."""
    return math.prod(sizes(degrees).values())
