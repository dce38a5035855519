"""DeepSpeed's configuration as a dictionary that is read and changed by dotted keys, under Accelerate's name."""

from __future__ import annotations

import base64
import binascii
from copy import deepcopy
from pathlib import Path
from typing import Any

from accelerate_nb.config.value_types import DEEPEST_NESTING, LONGEST_TEXT, brief, parse_json
from accelerate_nb.errors import ConfigurationError


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
    text = _text(source)
    try:
        found = parse_json(text)
    except ValueError:
        try:
            found = parse_json(base64.urlsafe_b64decode(text).decode("utf-8"))
        except (ValueError, binascii.Error):
            found = None
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"DeepSpeed's configuration was given as {brief(source)}, which is no file that exists, and no JSON with keys of at most "
            f"{LONGEST_TEXT:,} characters and {DEEPEST_NESTING} levels. Pass the path of a ds_config.json, or a dictionary."
        )
    return found


def _text(source: Any) -> str:
    try:
        path = Path(source)
        return path.read_text(encoding="utf-8") if path.exists() else str(source)
    except (OSError, TypeError, ValueError):  # a text that is too long for the name of a file, or none at all
        return str(source)
