"""The settings of DeepSpeed under Accelerate's names: its plugin, and DeepSpeed's own configuration, read by dotted keys."""

import base64
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from torch.nn import Module

from accelerate_nb.config.environment import fp8_backend
from accelerate_nb.config.options import deepspeed
from accelerate_nb.config.value_types import DEEPEST_NESTING, LONGEST_TEXT, brief, parse_json
from accelerate_nb.errors import ConfigurationError, MissingExtraError, NotYetError
from accelerate_nb.runtime.compat.dataclasses import DistributedType
from accelerate_nb.runtime.compat.packages import is_rocm_available, is_transformers_available
from accelerate_nb.runtime.training.unwrap import requested_class
from accelerate_nb.runtime.world.state import AcceleratorState, is_initialized
from accelerate_nb.user_warnings import warn_user


class HfDeepSpeedConfig:
    """
    DeepSpeed's configuration, read by dotted keys: of a dictionary, a JSON file, or JSON as text, plain or in base 64.

    >>> config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    >>> config.get_value("zero_optimization.stage"), config.is_zero3(), config.is_offload()
    (3, True, False)
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        # a copy: "auto" is replaced in it, and a person's own dictionary may be used again
        self.config: dict[str, Any] = (
            deepcopy(config_file_or_dict) if isinstance(config_file_or_dict, dict) else _read(config_file_or_dict)
        )
        self.set_stage_and_offload()

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The dictionary that a dotted key's last part stands in, with that part; `None` where there is no such dictionary."""
        *nodes, key = ds_key_long.split(".")
        found: Any = self.config
        for node in nodes:
            found = found.get(node)
            if found is None:
                return None, key
        return found, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key, or `default` where it is not set."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Take a dotted key out, with all below it; with `must_exist`, `ConfigurationError` where it is not set."""
        node, key = self.find_config_node(ds_key_long)
        if node is not None and node.get(key) is not None:
            del node[key]
        elif must_exist:
            raise ConfigurationError(
                f"{ds_key_long} was to be taken out of DeepSpeed's configuration, which has no such entry: {self.config}"
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key is set to something that counts as true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is set, to something that counts as false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether gradients and optimizer states are in parts."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether weights are in parts, too."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or weights are kept in host memory, or on a disk."""
        return self._offload

    def set_stage_and_offload(self) -> None:
        """Read the stage and whether something is offloaded anew, after the configuration was changed."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = {self.get_value(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")}
        self._offload = self._stage in {2, 3} and not devices.isdisjoint({"cpu", "nvme"})


def _read(source: Any) -> dict[str, Any]:
    text = str(source)
    # of a text that is no name of a file, or too long for one
    with suppress(OSError, TypeError, ValueError):
        text = Path(source).read_text(encoding="utf-8")
    found = None
    with suppress(ValueError):
        found = parse_json(text)
    if found is None:
        with suppress(ValueError):
            found = parse_json(base64.urlsafe_b64decode(text).decode("utf-8"))
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"DeepSpeed's configuration was given as {brief(source)}, which is no file that exists, and no JSON with keys of at most "
            f"{LONGEST_TEXT:,} characters and {DEEPEST_NESTING} levels. Pass the path of a ds_config.json, or a dictionary."
        )
    return found


# The key of DeepSpeed's configuration that an argument stands for.
_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}


@dataclass
class DeepSpeedPlugin(deepspeed.DeepSpeedOptions):
    """
    The configuration of DeepSpeed; `None` leaves a value to DeepSpeed's configuration, or to the `ACCELERATE_*` variables.

    `hf_ds_config` is DeepSpeed's own configuration: the path of a file, a dictionary or an `HfDeepSpeedConfig`. Its "auto" values are
    filled in by `Accelerator.prepare`. `deepspeed_config` is the dictionary that DeepSpeed gets.

    >>> plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2)
    >>> plugin.get_value("zero_optimization.stage"), plugin.is_auto("train_micro_batch_size_per_gpu")
    (3, True)
    """

    def __post_init__(self) -> None:
        deepspeed.OPTIONS.complete(self, os.environ)
        if self.enable_msamp is None:
            self.enable_msamp = fp8_backend(os.environ).upper() == "MSAMP"
        if self.msamp_opt_level is None:
            self.msamp_opt_level = os.environ.get("ACCELERATE_FP8_OPT_LEVEL", "O1")
        given = self.hf_ds_config
        if given == "none":
            self.hf_ds_config = HfDeepSpeedConfig(self._own_configuration())
        else:
            # transformers' own has the methods of Accelerate's
            self.hf_ds_config = given if hasattr(given, "find_config_node") else HfDeepSpeedConfig(given)
            self._complete_configuration()
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        msamp = self.deepspeed_config.get("msamp")
        if self.enable_msamp or (isinstance(msamp, dict) and msamp.get("enabled")):
            raise NotYetError(
                "MS-AMP was requested with DeepSpeed, by enable_msamp, ACCELERATE_FP8_BACKEND or msamp in a configuration, which is not "
                "offered here yet. Leave it out, and use mixed_precision='bf16'."
            )
        # the panel and the loop say how far a training is
        self.deepspeed_config["steps_per_print"] = float("inf")
        is_zero3 = self.hf_ds_config.is_zero3()
        if self.zero3_init_flag is None:
            self.zero3_init_flag = is_zero3
        if self.zero3_init_flag and not is_zero3:
            warn_user("zero3_init_flag=True was requested, which is for ZeRO's stage 3 alone: it is False here.")
            self.zero3_init_flag = False
        self._selected = False

    def _complete_configuration(self) -> None:
        """Give a configuration that was passed the values of arguments where it has "auto", and the arguments its own."""
        config = self.hf_ds_config
        config.config.setdefault("gradient_accumulation_steps", 1)
        if "zero_optimization" not in config.config:
            raise ConfigurationError(
                "DeepSpeed's configuration was given without zero_optimization, and Accelerate's way to train with it needs one. "
                'Add "zero_optimization": {"stage": 0} to it, or another stage.'
            )
        # what a file of Accelerate's said beside a file of DeepSpeed's, by the launcher's word
        fields_beside = set(os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(","))
        if said := sorted((deepspeed.SAID_BY_FILE | {"mixed_precision"}) & fields_beside):
            raise ConfigurationError(
                f"{', '.join(said)} was requested beside a deepspeed_config_file, which says it itself. Write it in that file, and "
                "leave it out here."
            )
        values = {key: getattr(self, name) for name, key in _KEYS.items()}
        for key in values:
            self.fill_match(key, must_match=False, **values)
        config.set_stage_and_offload()
        for name, key in _KEYS.items():
            value = config.get_value(key)
            if value not in {None, "auto"}:
                setattr(self, name, value)

    def _own_configuration(self) -> dict[str, Any]:
        optimizer_path, param_path = (
            getattr(self, f"offload_{part}_nvme_path") if getattr(self, f"offload_{part}_device") == "nvme" else None
            for part in ("optimizer", "param")
        )
        found: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": {
                "stage": self.zero_stage,
                "offload_optimizer": {"device": self.offload_optimizer_device, "nvme_path": optimizer_path},
                "offload_param": {"device": self.offload_param_device, "nvme_path": param_path},
                "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
            },
        }
        if self.gradient_clipping:
            found["gradient_clipping"] = self.gradient_clipping
        return found

    # The configuration

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """
        Give a dotted key that is "auto" its value of `kwargs`, which are by dotted keys, too.

        `ConfigurationError` where `kwargs` has none. With `must_match`, a value that stands there already and differs is added to
        `mismatches`, in words.
        """
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        current = node.get(key)
        if current == "auto":
            if ds_key_long not in kwargs:
                raise ConfigurationError(
                    f"`{ds_key_long}` is 'auto' in DeepSpeed's configuration, and there is no value to put there. Write one in the "
                    "configuration."
                )
            node[key] = kwargs[ds_key_long]
        elif must_match and ds_key_long in kwargs and current is not None and current != kwargs[ds_key_long]:
            found = [] if mismatches is None else mismatches
            found.append(f"- ds {ds_key_long}={node[key]} vs arg {ds_key_long}={kwargs[ds_key_long]}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in all values that are "auto", as `fill_match` does; `ConfigurationError` names all that do not match."""
        mismatches = [] if mismatches is None else mismatches
        for key, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", mismatches, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, mismatches, must_match, **kwargs)
        if mismatches and not prefix:
            lines = "\n".join(mismatches)
            raise ConfigurationError(
                f"Values of DeepSpeed's configuration do not match those of the arguments:\n{lines}\nThe easiest is to write "
                "'auto' in DeepSpeed's configuration."
            )

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a dotted key is still to be filled in."""
        return bool(self.hf_ds_config.get_value(ds_key_long) == "auto")

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key, or `default` where it is not set."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write a precision into the configuration; `ConfigurationError` where that requests the other type of 16 bits."""
        config = self.deepspeed_config
        if mixed_precision == "fp16":
            config.setdefault("fp16", {"enabled": True, "auto_cast": True})
        elif mixed_precision in {"bf16", "fp8"}:
            config.setdefault("bf16", {"enabled": True})
        other = "bf16" if mixed_precision == "fp16" else "fp16"
        if mixed_precision != "no" and str(self.get_value(f"{other}.enabled", False)).lower() == "true":
            raise ConfigurationError(
                f"mixed_precision={mixed_precision!r} was requested, but DeepSpeed's configuration enables {other}. Pass "
                f"mixed_precision={other!r}, or write 'auto' there."
            )
        enabled: dict[str, Any] = {
            "fp16.enabled": mixed_precision == "fp16",
            "bf16.enabled": mixed_precision in {"bf16", "fp8"},
        }
        for key in enabled:
            config.setdefault(key.partition(".")[0], {"enabled": False})
            self.fill_match(key, must_match=False, **enabled)
        if enabled["bf16.enabled"] and is_rocm_available():
            # there a sum in bf16 may overflow unnoticed
            config.setdefault("communication_data_type", "fp32")

    def set_deepspeed_weakref(self) -> None:
        """Have transformers know this configuration, where it is installed: a model that it makes is in parts from the beginning."""
        config = deepcopy(self.deepspeed_config)
        if self.zero3_init_flag and not is_transformers_available():
            raise MissingExtraError(
                "zero3_init_flag=True was requested, which needs transformers, and it is not installed: pip install transformers."
            )
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(key, "auto") == "auto":
                config[key] = 1
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        if is_transformers_available():
            from transformers.integrations import deepspeed as untyped

            integration: Any = untyped
            integration.unset_hf_deepspeed_config()
            # transformers keeps a weak reference to it
            self.dschf = integration.HfDeepSpeedConfig(config)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are made in parts."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """A block in which models are made in parts, or whole, whatever `zero3_init_flag` is."""
        before = self.zero3_init_flag
        if before == enable:
            # transformers may know another plugin's configuration, of which models are made
            yield
            return
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: Module) -> None:
        """
        Have stage 3 gather the weights of mixtures of experts as a whole; the classes are `transformer_moe_cls_names`.

        Which experts a batch goes through differs between ranks, and a rank that gathers weights waits for the others.
        `ConfigurationError` names a class that the model doesn't have.
        """
        if self.transformer_moe_cls_names is not None:
            from deepspeed.utils import set_z3_leaf_modules

            names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
            set_z3_leaf_modules(model, [requested_class(model, name, "transformer_moe_cls_names") for name in names])

    @property
    def selected(self) -> bool:
        """Whether this is the plugin in force, of one or several."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Put this plugin in force; `AcceleratorState().select_deepspeed_plugin(name)` calls it."""
        if not _from_accelerator_state:
            raise ConfigurationError(
                "A DeepSpeedPlugin was to be selected by itself, but the state has to know. Call "
                "`AcceleratorState().select_deepspeed_plugin(name)`."
            )
        self.set_deepspeed_weakref()
        self._selected = True

    def unselect(self) -> None:
        """Another plugin is in force."""
        self._selected = False


def choose_plugins(plugin: Any, plugins: Any, state: Any, is_requested: bool) -> Any:
    """The plugin or plugins given, else those of the first `Accelerator`, or of a launcher's variables; `None` without DeepSpeed."""
    if plugin is not None and plugins is not None:
        raise ConfigurationError("deepspeed_plugin and deepspeed_plugins were both given. Leave one of them out.")
    given = plugins if plugin is None else plugin
    known = state.deepspeed_plugins
    if given is None:
        return known or (DeepSpeedPlugin() if is_requested else None)
    if known is not None and known is not given:
        raise ConfigurationError(
            "A deepspeed_plugin was given to this process's second Accelerator, and the first has one already. Give the first "
            "deepspeed_plugins={name: plugin, ...}, and call accelerator.state.select_deepspeed_plugin(name) before prepare."
        )
    items = list(given.values()) if isinstance(given, Mapping) else [given]
    if not items or not all(isinstance(item, DeepSpeedPlugin) for item in items):
        raise ConfigurationError(
            f"`deepspeed_plugin` must be a DeepSpeedPlugin object, or several by name, but is {given!r}. Pass one, or "
            "strategy='deepspeed'."
        )
    return given


F = TypeVar("F", bound=Callable[..., Any])


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The plugin in force; `ConfigurationError` where the state is not one of DeepSpeed's."""
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigurationError(
            "The active DeepSpeed plugin was requested, but this run doesn't use DeepSpeed. "
            "Read it only where the state's distributed_type is DEEPSPEED."
        )
    return state.deepspeed_plugin


def deepspeed_required(func: F) -> F:
    """A decorator: the function raises `ConfigurationError` where an `Accelerator` was made without DeepSpeed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if is_initialized() and AcceleratorState().distributed_type != DistributedType.DEEPSPEED:
            raise ConfigurationError(
                f"{func.__name__} needs DeepSpeed, and the Accelerator of this process was made without it. "
                "Call it only in a run that uses DeepSpeed."
            )
        return func(*args, **kwargs)

    return cast("F", checked)
