"""Settings for a model that is split in several ways at once: along its layers' width, along the sequence, by sharding."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import device_mesh as meshes
from torch.distributed.device_mesh import DeviceMesh

from accelerate_nb.config.options.parallelism import DEGREES
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.world.world import AXES, Mesh
from accelerate_nb.user_warnings import warn_user

# What `accelerate.utils.dataclasses` offers.
__all__ = [
    "DeepSpeedSequenceParallelConfig", "TorchContextParallelConfig", "TorchPipelineParallelConfig",
    "TorchTensorParallelConfig", "TorchTensorParallelPlugin",
]  # fmt: skip

_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")


@dataclass
class TorchTensorParallelConfig:
    """
    The split of layers along their width.

    `plan` has the ways to split by names of layers, with `*` for any part of a name: "colwise", "rowwise" and others, or objects of
    torch's `ParallelStyle`; without it a model's own is taken, as those of transformers have one. With `loss_parallel` the
    output of the model's last layer stays split, as a DTensor, and cross-entropy is computed of its parts; `None` is read from the
    variable `PARALLELISM_CONFIG_TP_LOSS_PARALLEL`, and is false without it.

    >>> TorchTensorParallelConfig(plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})  # doctest: +SKIP
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | None = field(default=None, kw_only=True)
    loss_parallel: bool = field(default=None, kw_only=True)  # type: ignore[assignment]  # a truth value once it is made

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warn_user(
                "Async tensor parallelism is currently not supported, ignoring this option: leave enable_async_tp out."
            )
        if self.loss_parallel is None:
            self.loss_parallel = DEGREES.read("tp_loss_parallel", os.environ)


@dataclass
class TorchContextParallelConfig:
    """
    The split of sequences, and the way in which attention goes over all parts.

    With `attention="ring"` each process attends to the others' keys a part at a time; `cp_comm_strategy` is "allgather", in which they come
    at once, or "alltoall", in which they are handed around. With "heads" each process attends over whole sequences with some of the heads.
    Prepared loaders give each process its part of a batch's sequences, unless `cuts_batches` is false.

    What is `None` is read from the variables `PARALLELISM_CONFIG_CP_COMM_STRATEGY` and `PARALLELISM_CONFIG_CP_ATTENTION`, and is "allgather" and
    "ring" without them.
    """

    cp_comm_strategy: str | None = None
    attention: str | None = field(default=None, kw_only=True)
    cuts_batches: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        for name, key in {"cp_comm_strategy": "cp_comm_strategy", "attention": "cp_attention"}.items():
            if getattr(self, name) is None:
                setattr(self, name, DEGREES.read(key, os.environ))
            known = DEGREES.choices(key)
            if getattr(self, name) not in known:
                raise ConfigurationError(f"Invalid {name}: {getattr(self, name)}. Known ones are {', '.join(known)}.")


@dataclass
class TorchPipelineParallelConfig:
    """
    The stages of a pipeline, and how a batch passes through them.

    A batch is cut in `num_microbatches` parts, as many as there are processes in a pipeline where it is `None`. `schedule` is a name of
    torch's, in whose order `Accelerator.train_step` computes: "1F1B", "GPipe", "LoopedBFS", "Interleaved1F1B",
    "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV"; from "LoopedBFS" on a process has two stages. `split_points` names the
    modules at which the second and later stages begin; where it is "auto", stages have about equally many weights, or take
    equally many operations for `example_inputs`, a tuple of the model's arguments or a dictionary of them.

    What is `None` is read from the variables `PARALLELISM_CONFIG_PP_SCHEDULE` and `PARALLELISM_CONFIG_PP_NUM_MICROBATCHES`.

    >>> TorchPipelineParallelConfig(schedule="Interleaved1F1B", num_microbatches=8).split_points
    'auto'
    """

    schedule: str = None  # type: ignore[assignment]  # a name once it is made
    num_microbatches: int | None = None
    split_points: Sequence[str] | str = "auto"
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.schedule is None:
            self.schedule = DEGREES.read("pp_schedule", os.environ)
        if self.num_microbatches is None:
            self.num_microbatches = DEGREES.read("pp_num_microbatches", os.environ)
        if self.num_microbatches is not None and self.num_microbatches < 1:
            raise ConfigurationError(
                f"num_microbatches={self.num_microbatches} was requested, but a batch is cut in 1 part at least. Leave it out for one "
                "part a process."
            )
        if isinstance(self.split_points, str) and self.split_points != "auto":
            raise ConfigurationError(
                f"split_points={self.split_points!r} was requested. Pass a list of names of modules, or 'auto'."
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """
    DeepSpeed's split of a sequence; its length is variable unless `sp_seq_length` fixes it.

    What is `None` is read from the variables `PARALLELISM_CONFIG_SP_*`. `sp_attn_implementation` is one of torch's or a flash
    attention of the hub, such as "kernels-community/flash-attn2".
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = DEGREES.read("sp_seq_length_is_variable", os.environ)
        if self.sp_seq_length is None and not self.sp_seq_length_is_variable:
            length = os.environ.get("PARALLELISM_CONFIG_SP_SEQ_LENGTH")
            if length is None:
                raise ConfigurationError(
                    "sp_seq_length_is_variable is false, and there is no sp_seq_length. Pass it, or set "
                    "PARALLELISM_CONFIG_SP_SEQ_LENGTH."
                )
            self.sp_seq_length = None if length == "None" else int(length)
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = DEGREES.read("sp_attn_implementation", os.environ)
        name = self.sp_attn_implementation
        if name is not None and name not in _ATTENTIONS and not ("/" in name and "flash-attn" in name):
            raise ConfigurationError(
                f"Invalid sp_attn_implementation: {self.sp_attn_implementation}. Known ones are {', '.join(_ATTENTIONS)} and "
                "flash attentions of the hub, such as 'kernels-community/flash-attn2'."
            )


@dataclass
class TorchTensorParallelPlugin:
    """The split of layers along their width, in the terms of older versions of Accelerate."""

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None


@dataclass
class ParallelismConfig:
    """
    The numbers of processes over which the model is copied, sharded, and split in width or along the sequence.

    What is `None` is read from the variables `PARALLELISM_CONFIG_*`, and is 1 without them.

    >>> ParallelismConfig(dp_shard_size=4, tp_size=2).total_size
    8
    """

    dp_replicate_size: int = None  # type: ignore[assignment]  # a number once it is made
    dp_shard_size: int = None  # type: ignore[assignment]  # a number once it is made
    tp_size: int = None  # type: ignore[assignment]  # a number once it is made
    cp_size: int = None  # type: ignore[assignment]  # a number once it is made
    cp_backend: str = None  # type: ignore[assignment]  # a name once it is made
    sp_size: int = None  # type: ignore[assignment]  # a number once it is made
    sp_backend: str = None  # type: ignore[assignment]  # a name once it is made
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int = field(default=None, kw_only=True)  # type: ignore[assignment]  # a number once it is made
    pp_handler: TorchPipelineParallelConfig | None = field(default=None, kw_only=True)

    device_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in (*(f"{axis}_size" for axis in AXES), "cp_backend", "sp_backend"):
            if getattr(self, name) is None:
                setattr(self, name, DEGREES.read(name, os.environ))
        for axis in AXES:
            if self._size(axis) < 1:
                raise ConfigurationError(
                    f"{axis}_size must be at least 1, but got {self._size(axis)}. Leave it out for 1."
                )
        for name in ("cp_backend", "sp_backend"):
            known = DEGREES.choices(name)
            if (value := getattr(self, name)) not in known:
                raise ConfigurationError(f"{name} must be one of {list(known)}, but got {value}. Leave it out.")
        if self.cp_enabled and self.sp_enabled:
            raise ConfigurationError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} are mutually exclusive: both split the sequence. "
                "Set one of them to 1."
            )
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise ConfigurationError(
                f"dp_replicate_size={self.dp_replicate_size} was requested with tp_size={self.tp_size} and "
                f"cp_size={self.cp_size}, but copies of a split model have to be sharded too. Set dp_shard_size above 1."
            )
        handlers: dict[str, Any] = {
            "tp": TorchTensorParallelConfig,
            "pp": TorchPipelineParallelConfig,
            "cp": TorchContextParallelConfig,
            "sp": DeepSpeedSequenceParallelConfig,
        }
        for axis in self._used(*handlers):
            setattr(self, f"{axis}_handler", getattr(self, f"{axis}_handler") or handlers[axis]())

    @property
    def mesh(self) -> Mesh:
        """The same degrees as the mesh of a training."""
        return Mesh(**{axis: self._size(axis) for axis in AXES})

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the model is copied."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether the model is sharded."""
        return self.dp_shard_size > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split along their width."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether a sequence is split by torch."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether a sequence is split by DeepSpeed."""
        return self.sp_size > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether layers are on several stages."""
        return self.pp_size > 1

    @property
    def total_size(self) -> int:
        """The number of processes that all of it takes."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of processes over which data are spread."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that work on the same batch."""
        return self.tp_size * self.cp_size * self.sp_size * self.pp_size

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes, of those in use, along which batches differ."""
        return self._used("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes, of those in use, along which batches are the same."""
        return self._used("pp", "tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes, of those in use, along which the model is sharded."""
        return self._used("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes, of those in use, along which the loss is averaged."""
        return self._used("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes for FSDP; the second one is made of those in `dp_shard_cp_dim_names`."""
        return [*self._used("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes in use."""
        return self.dp_dim_names + self.non_dp_dim_names

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh of processes, with the joint axes `dp`, `dp_shard_cp` and `dp_cp`; `None` where no axis is in use."""
        if not self.active_mesh_dims or self.sp_enabled:
            return None  # DeepSpeed makes its own groups for a sequence
        names, shape = self._get_mesh()
        mesh = meshes.init_device_mesh(device_type, shape, mesh_dim_names=names)
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, axes in joint.items():
            if axes:
                mesh[axes]._flatten(name)  # type: ignore[index]  # torch takes a list too, as Accelerate's callers see it
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh of processes, made the first time; it is of one kind of device."""
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigurationError(
                    "A device mesh was requested before there was one. Name a device: 'cuda', 'cpu'."
                )
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            raise ConfigurationError(
                f"A device mesh of {device_type!r} was requested, but there is one of {self.device_mesh.device_type!r}. "
                "Make another ParallelismConfig for another kind of device."
            )
        return self.device_mesh

    def to_json(self) -> dict[str, Any]:
        """The settings as plain values."""
        settings = {name: value for name, value in vars(self).items() if name != "device_mesh"}
        return {name: dict(vars(value)) if hasattr(value, "__dict__") else value for name, value in settings.items()}

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The names and sizes of the mesh's axes, those in use (Hugging Face's name, which others read)."""
        used = self._used(*AXES)
        return tuple(used), tuple(map(self._size, used))

    def _size(self, axis: str) -> int:
        size: int = getattr(self, f"{axis}_size")
        return size

    def _used(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._size(axis) > 1]
