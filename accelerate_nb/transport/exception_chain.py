"""An exception on its way to the notebook, with all that led to it: causes, contexts, the exceptions of a group."""

import ast
import dis
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import FrameSummary, extract_tb
from types import CodeType, FunctionType, TracebackType
from typing import Any

from accelerate_nb.errors import UnpicklableError, relink
from accelerate_nb.failures.exception_copy import linked_exceptions, message_of, rebuilt_exception
from accelerate_nb.failures.traceback_format import below_ours, without_middle
from accelerate_nb.transport.serializer import dump_homeward, load


@dataclass(frozen=True, slots=True)
class TracebackCall:
    """One line of a traceback; columns count bytes, as Python's own do."""

    filename: str
    name: str
    line: int
    end_line: int
    column: int
    end_column: int


@dataclass(frozen=True, slots=True)
class ExceptionLink:
    """One exception of a chain, pickled by itself, so that one that can't be unpickled leaves the others alone."""

    type: str
    message: str
    # empty where it could not be pickled at all, for the `reason`
    pickled: tuple[bytes, ...]
    reason: str
    calls: tuple[TracebackCall, ...]
    # positions in the chain
    cause: int | None
    context: int | None
    suppress_context: bool


@dataclass(frozen=True, slots=True)
class ExceptionChain:
    """An exception, and after it all that led to it; it is unpickled as that exception, with its links and tracebacks."""

    links: tuple[ExceptionLink, ...]

    def __reduce__(self) -> tuple[Callable[[tuple[ExceptionLink, ...]], BaseException], tuple[Any, ...]]:
        return restored, (self.links,)


def portable(error: BaseException, known: frozenset[str] | None = None) -> Any:
    """A stand-in for an exception in a pickle, which is unpickled as the exception, or as much of it as can be pickled."""
    chain = linked_exceptions(error)
    positions = {id(link): index for index, link in enumerate(chain)}
    return ExceptionChain(tuple(_link(link, chain, positions, known) for link in chain))


def restored(links: Sequence[ExceptionLink]) -> BaseException:
    """The first exception of a chain, as it was where it was raised; frames of its traceback hold no variables."""
    errors: dict[int, BaseException] = {}

    def error_at(index: int) -> BaseException:
        if index not in errors:
            link = links[index]
            # what it holds may refer to it
            errors[index] = _stand_in(link, "is unpickled already" if link.pickled else link.reason)
            try:
                errors[index] = load(link.pickled, error_at) if link.pickled else errors[index]
            except Exception as failure:  # noqa: BLE001 - unpickling runs anybody's code
                errors[index] = _stand_in(link, f"could not be unpickled: {type(failure).__name__}: {failure}")
        return errors[index]

    for index, link in enumerate(links):
        error = error_at(index).with_traceback(traceback_of(link.calls))
        cause, context = (None if position is None else error_at(position) for position in (link.cause, link.context))
        relink(error, cause, context, link.suppress_context)
    return errors[0]


def traceback_of(calls: Sequence[TracebackCall]) -> TracebackType | None:
    """A traceback through these calls, outermost first."""
    trace = None
    for call in reversed(calls):
        # the code of a generator that would raise where the call was
        tree = ast.parse("def generator():\n    raise ZeroDivisionError\n    yield")
        for node in ast.walk(tree):
            if isinstance(node, (ast.stmt, ast.expr)):
                node.lineno, node.end_lineno = call.line, call.end_line
                node.col_offset, node.end_col_offset = call.column, call.end_column
        module = compile(tree, call.filename, "exec")
        code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
        code = code.replace(co_name=call.name)
        raising = next(step.offset for step in dis.get_instructions(code) if "RAISE" in step.opname)
        # the frame of a generator that never began refers to no caller, which would stay in memory with all its variables
        frame = FunctionType(code, {})().gi_frame
        trace = TracebackType(trace, frame, raising, call.line)
    return trace


def _link(
    error: BaseException, chain: Sequence[BaseException], positions: Mapping[int, int], known: frozenset[str] | None
) -> ExceptionLink:
    def reference(value: Any) -> int | None:
        return None if value is error else positions.get(id(value))

    def pickled(candidate: BaseException) -> tuple[bytes, ...]:
        entries = tuple(bytes(entry) for entry in dump_homeward(candidate, known, reference))
        # a constructor may want other arguments than the exception keeps
        load(entries, chain.__getitem__)
        return entries

    entries: tuple[bytes, ...] = ()
    reason = ""
    try:
        entries = pickled(error)
    except Exception as failure:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
        reason = f"{type(failure).__name__}: {failure}"
    for args in () if entries else (error.args, (message_of(error),)):
        # anybody's code, as above; an exception group wants its exceptions
        with suppress(Exception):
            notes = [*getattr(error, "__notes__", ()), f"Its attributes stayed in the worker ({reason})."]
            entries = pickled(rebuilt_exception(type(error), args, {"__notes__": notes}))
            break
    return ExceptionLink(
        type=type(error).__qualname__,
        message=message_of(error),
        pickled=entries,
        reason=f"could not be pickled: {reason}",
        calls=tuple(map(_call, without_middle(below_ours(extract_tb(error.__traceback__))))),
        cause=positions.get(id(error.__cause__)),
        context=positions.get(id(error.__context__)),
        suppress_context=error.__suppress_context__,
    )


def _stand_in(link: ExceptionLink, reason: str) -> UnpicklableError:
    return UnpicklableError(f"{link.type}: {link.message} (the exception itself {reason})")


def _call(frame: FrameSummary) -> TracebackCall:
    line, column = frame.lineno or 1, getattr(frame, "colno", None) or 0
    end_line, end_column = getattr(frame, "end_lineno", None) or line, getattr(frame, "end_colno", None) or column
    return TracebackCall(frame.filename, frame.name, line, end_line, column, end_column)
