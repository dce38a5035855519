"""The error of a name that is not offered yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from types import FunctionType
from typing import Any, NoReturn, TypeVar, cast

from accelerate_nb.errors import NotYetError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Unsupported:
    """
    A part of Accelerate that is not offered yet, with what to do until then.

    As a decorator it makes a function that has nothing but a signature raise `NotYetError`, and so the methods of a class.
    """

    part: str
    instead: str

    def __call__(self, item: F) -> F:
        """The function, or the class, which raises when it is called."""
        if not isinstance(item, type):
            return cast("F", self._refusing(item))
        for name, method in list(vars(item).items()):
            if isinstance(method, FunctionType):
                setattr(item, name, self._refusing(method))
        return item

    def all_of(self, module: dict[str, Any]) -> None:
        """Decorate what a module has defined so far: every function, and every class but data classes, which can be made."""
        for name, item in list(module.items()):
            if (
                isinstance(item, (FunctionType, type))
                and item.__module__ == module["__name__"]
                and not is_dataclass(item)
            ):
                module[name] = self(item)

    def _refusing(self, function: Callable[..., Any]) -> Callable[..., NoReturn]:
        message = f"{function.__qualname__} needs {self.part}, which is not offered here yet. {self.instead}"

        @functools.wraps(function)
        def refusing(*_: Any, **__: Any) -> NoReturn:
            raise NotYetError(message)

        refusing.__doc__ = f"Raise `NotYetError`: {message}"
        return refusing


def refuse(owner: str, **given: Any) -> None:
    """Raise `NotYetError` for the first argument of `owner` that was given a value."""
    for name, value in given.items():
        if value is not None:
            raise NotYetError(f"{owner}({name}=...) is not offered here yet. Leave it out.")
