"""Models made without memory for their weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import Module, Parameter

from accelerate_nb.big_models.tensors import Device, as_device, check_device_same
from accelerate_nb.runtime.compat.env_vars import parse_flag_from_env


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """
    A block in which modules are made with their parameters on torch's `meta` device: shapes and dtypes without memory.

    Buffers are made as always unless `include_buffers`, which is the variable `ACCELERATE_INIT_INCLUDE_BUFFERS` by default.

    >>> with init_empty_weights():
    ...     model = torch.nn.Linear(100_000, 100_000)
    >>> model.weight.device
    device(type='meta')
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """
    A block in which modules are made with their parameters on `device`; with `include_buffers` every new tensor is there.

    A parameter that two modules share stays shared where it is on the device already.
    """
    target = as_device(device)
    if parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS") if include_buffers is None else include_buffers:
        with target:
            yield
        return
    register = Module.register_parameter

    def register_on_device(module: Module, name: str, param: Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not check_device_same(param.device, target):
            module._parameters[name] = _on(target, param)

    # torch has no hook of its own that may replace a parameter while its module is being made
    Module.register_parameter = register_on_device  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Module.register_parameter = register  # type: ignore[method-assign]


def _on(device: torch.device, param: Parameter) -> Parameter:
    """The parameter on the device, of its own class, with the marks that others left on it."""
    marks, parameter_class = param.__dict__, type(param)
    # a class of parameters takes what it carries as arguments, as those of bitsandbytes do; but the mark by which transformers
    # knows what it has initialised is no argument of any
    is_plain = parameter_class is Parameter
    arguments = {name: mark for name, mark in marks.items() if not is_plain and name != "_is_hf_initialized"}
    moved = parameter_class(param.to(device), requires_grad=param.requires_grad, **arguments)
    moved.__dict__.update({name: mark for name, mark in marks.items() if name not in arguments})
    return moved
