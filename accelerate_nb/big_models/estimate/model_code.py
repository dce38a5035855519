"""A model that code makes, named by a file or a module and what is in it, without memory for its weights."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.nn import Module

from accelerate_nb.big_models.empty import init_empty_weights
from accelerate_nb.errors import ConfigurationError


def model_of(location: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """
    The value of a name in a file, or in a module of Python's, or what it returns where it is called with `arguments`.

    Without a name it is the only module that the file defines. `ConfigurationError` says what is there where the name is not.
    """
    with _importing_from(location):
        loaded = _loaded(location)
        chosen = name or _only_module(loaded, location)
        return _called(_looked_up(loaded, location, chosen), f"{location}:{chosen}", arguments)


def without_memory(make: Callable[[], Any], source: str) -> Any:
    """
    The model that `make` makes, on torch's meta device.

    A model may read numbers while it is made, those of a `linspace` for one: then all but its weights has memory.
    """
    try:
        with init_empty_weights(include_buffers=True):
            return make()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
    try:
        with init_empty_weights(include_buffers=False):
            return make()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise ConfigurationError(
            f"{source} needs the numbers of its weights while it is made ({str(error).splitlines()[0]}), and they have "
            "none. Name a checkpoint of it instead."
        ) from error


@contextmanager
def _importing_from(location: str) -> Iterator[None]:
    """Imports find modules beside a file, or in the current folder, as with `python file.py` and `python -m`."""
    folder = str(Path(location).resolve().parent if location.endswith(".py") else Path.cwd())
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


def _loaded(location: str) -> ModuleType:
    if not location.endswith(".py"):
        try:
            return import_module(location)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{location}.".startswith(f"{error.name}."):
                raise
            raise ConfigurationError(
                f"There is no module {error.name}, which {location} was to be found in. Correct the name, or install it."
            ) from None
    path = Path(location).expanduser()
    if not path.is_file():
        raise ConfigurationError(f"{path} should be a Python file, but is not there. Correct the path.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # data classes, and pickles, find their module by its name
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _looked_up(module: ModuleType, location: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(
                f"{location} has no {name}. It has {', '.join(_modules_in(module)) or 'no modules'}."
            )
        found = getattr(found, part)
    return found


def _only_module(module: ModuleType, location: str) -> str:
    names = _modules_in(module)
    if len(names) == 1:
        return names[0]
    if names:
        raise ConfigurationError(f"{location} has several models: {', '.join(names)}. Name one: {location}:{names[0]}.")
    raise ConfigurationError(
        f"{location} has no torch.nn.Module. Name the function that gives the model: {location}:name."
    )


def _modules_in(module: ModuleType) -> list[str]:
    """The names of a file's own classes of modules, and of modules that it made."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Module)
        or (inspect.isclass(value) and issubclass(value, Module) and value.__module__ == module.__name__)
    ]


def _called(found: Any, location: str, arguments: Mapping[str, Any]) -> Any:
    """The value of a name: itself where it is a module, else what it returns."""
    if isinstance(found, Module) or not callable(found):
        if arguments:
            raise ConfigurationError(f"{location} is there already, and takes no arguments. Leave --args out.")
        return found
    signature = inspect.signature(found)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{location}{signature} can't be called with {dict(arguments) or 'nothing'}: {error}. "
            "Pass what it needs as JSON, such as --args '{\"hidden\": 128}'."
        ) from None
    return found(**arguments)
