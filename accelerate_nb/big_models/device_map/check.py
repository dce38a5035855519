"""Device maps: which part of a model is on which device."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch.nn import Module

from accelerate_nb.big_models.devices import DISK, Device, DeviceMap, as_device
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.user_warnings import warn_user


def check_device_map(model: Module, device_map: DeviceMap) -> None:
    """
    Check that a device map has a device for every tensor in the model's state dict.

    Raises a `ConfigurationError`, which is a `ValueError`, that names the modules which have none; warns of names that are
    no part of the model.
    """
    names = list(model.state_dict())
    tensors = [*names, *(name for name, _ in model.named_buffers())]
    known = {*tensors, *(name for name, _ in model.named_modules())}
    strange = [name for name in device_map if name and name not in known]
    if strange:
        near = [match for name in strange for match in difflib.get_close_matches(name, known, n=1)]
        suggestion = f" Did you mean {near}?" if near else ""
        warn_user(
            f"The following device_map keys do not match any submodules in the model: {strange}.{suggestion}",
            UserWarning,
        )
    left = [name for name in names if covering(name, device_map) is None]
    if left:
        modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in left))
        raise ConfigurationError(
            f"The device_map provided does not give any device for the following parameters: {', '.join(left)}. "
            f"Add their modules to it: {', '.join(repr(module) for module in modules)}; or add a device for all that is not "
            "named, under the empty name ''."
        )


def check_devices(device_map: DeviceMap) -> None:
    """Check that each device in the map is one; the error names the module that stands beside it."""
    for name, device in device_map.items():
        if device == DISK:
            continue
        try:
            as_device(device)
        except ConfigurationError as error:
            raise ConfigurationError(f"The device_map has no available device for {name!r}: {error}") from None


def device_of(name: str, device_map: DeviceMap) -> Device:
    """The device that a map has for a parameter or module: its own, or that of the nearest module around it."""
    found = covering(name, device_map)
    if found is None:
        raise ConfigurationError(
            f"The `device_map` does not contain the module {name}: {name} doesn't have any device set. "
            "Add it, one of the modules around it, or the empty name '' for all that is not named."
        )
    return device_map[found]


def covering(name: str, names: Iterable[str]) -> str | None:
    """The nearest of these names around a parameter or module; `None` where none is."""
    known = names if isinstance(names, (dict, set)) else set(names)
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name if name in known else None


def clean_device_map(device_map: dict[str, Device], module_name: str = "") -> dict[str, Device]:
    """The same map with one entry for each module whose parts are all on one device; the given map is changed."""
    prefix = f"{module_name}." if module_name else ""
    parts = [name for name in device_map if name.startswith(prefix)]
    devices = [device_map[name] for name in parts]
    if len(parts) > 1 and len(set(devices)) == 1:
        for name in parts:
            del device_map[name]
        device_map[module_name] = devices[0]
        return device_map
    depth = prefix.count(".") + 1
    for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in parts if name != module_name):
        clean_device_map(device_map, child)
    return device_map
