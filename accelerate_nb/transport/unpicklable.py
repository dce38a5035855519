"""The search for what of a function can't travel: the variable's name, its type, and where it is captured."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate_nb.errors import AccelerateNbError, NeedsForkError, PayloadError
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.serializer import PROTOCOL, dump

# How far the search looks into what captures what.
_DEEPEST = 6


@dataclass(frozen=True, slots=True)
class UnpicklableValue:
    """A value that can't be pickled, reached over `path` (outermost name first), captured by the function in `owner`."""

    value: Any
    path: tuple[str, ...]
    owner: types.CodeType | None


def explain(values: Mapping[str, Any], error: BaseException, sources: CellSources) -> AccelerateNbError:
    """The error to raise for named values of which one, at least, could not be pickled with `error`."""
    if isinstance(error, NeedsForkError):
        return error
    seen: set[int] = set()
    searches = (_search(value, (name,), None, seen, 0, dump) for name, value in values.items())
    unpicklable_value = next((found for found in searches if found is not None), None)
    if unpicklable_value is None:
        return PayloadError(
            f"The function or its arguments can't be sent to the workers: {type(error).__name__}: {error}. "
            "Make what can't travel inside the function."
        )
    value_type = type(unpicklable_value.value)
    kind = f"{value_type.__module__}.{value_type.__qualname__}".removeprefix("builtins.")
    name = unpicklable_value.path[-1]
    name = name[2:-2] if name.startswith("['") else name
    return PayloadError(
        f"{name!r}, a {kind}, can't be sent to the workers. It is captured as {' → '.join(unpicklable_value.path)}"
        f"{_where(unpicklable_value, sources)} ({type(error).__name__}: {error}). "
        f"Make {name!r} inside the function, or pass what it is made from."
    )


def unpicklable_part(value: Any, name: str, dump_value: Callable[[Any], object]) -> str:
    """
    The part of a value that `dump_value` can't pickle, as Python would reach it from `name`, with its type.

    >>> unpicklable_part({"lock": threading.Lock()}, "result", dump)
    "result['lock'] is a lock"
    """
    found = _search(value, (name,), None, set(), 0, dump_value)
    if found is None:
        return f"{name} is more than can be pickled"
    path = "".join(part if part.startswith(("[", ".")) else f" → {part}" for part in found.path[1:])
    kind = type(found.value).__qualname__
    return f"{name}{path} is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def _where(unpicklable_value: UnpicklableValue, sources: CellSources) -> str:
    owner = unpicklable_value.owner
    if owner is None:
        return ""
    return f" by {owner.co_name!r} in {sources.location(owner.co_filename, owner.co_firstlineno)}"


def _search(
    value: Any,
    path: tuple[str, ...],
    owner: types.CodeType | None,
    seen: set[int],
    depth: int,
    dump_value: Callable[[Any], object],
) -> UnpicklableValue | None:
    """The innermost thing that fails, depth first; `None` where all parts can travel."""
    if id(value) in seen or depth > _DEEPEST or _travels(value, dump_value):
        return None
    seen.add(id(value))
    if _refuses(value):
        return UnpicklableValue(value, path, owner)
    for name, part, holder in _parts(value):
        found = _search(part, (*path, name), holder or owner, seen, depth + 1, dump_value)
        if found is not None:
            return found
    return UnpicklableValue(value, path, owner)


def _travels(value: Any, dump_value: Callable[[Any], object]) -> bool:
    try:
        dump_value(value)
    except Exception:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
        return False
    return True


def _refuses(value: Any) -> bool:
    """Whether the value itself refuses, as an `Accelerator` does, whatever its parts would do."""
    if getattr(type(value), "belongs_to_process", False):
        return True
    try:
        value.__reduce_ex__(PROTOCOL)
    except AccelerateNbError:
        return True
    except Exception:  # noqa: BLE001 - anybody's code, as above
        return False
    return False


def _parts(value: Any) -> Iterator[tuple[str, Any, types.CodeType | None]]:
    """The parts of a value: the name of each, the part, and the code that captures it."""
    match value:
        case types.FunctionType():
            return ((name, part, value.__code__) for name, part in _captured(value))
        case types.MethodType():
            return iter([("self", value.__self__, getattr(value.__func__, "__code__", None))])
        case partial():
            held = {"func": value.func, **dict(_numbered(value.args, "args")), **value.keywords}
            return _named(held.items())
        case Mapping():
            return _named((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple() | set() | frozenset():
            return _named(_numbered(value, ""))
        case type():
            return _named(_members(value))
        case _:
            return _named(_attributes(value))


def _named(parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any, types.CodeType | None]]:
    return ((name, part, None) for name, part in parts)


def _numbered(parts: Iterable[Any], name: str) -> Iterator[tuple[str, Any]]:
    return ((f"{name}[{index}]", part) for index, part in enumerate(parts))


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, part in vars(kind).items():
        if not name.startswith("__") or isinstance(part, (types.FunctionType, staticmethod, classmethod)):
            yield f"{kind.__name__}.{name}", getattr(part, "__func__", part)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield type(value).__name__, type(value)
    for name in (*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())):
        yield f".{name}", getattr(value, name, None)


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            # a variable that is not set yet
            continue
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for index, default in enumerate(function.__defaults__ or ()):
        yield f"default {index}", default
    yield from (function.__kwdefaults__ or {}).items()


def _global_names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return {*code.co_names}.union(*(_global_names(const) for const in inner))
