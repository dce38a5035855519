"""The options of a script: the assignments of the cell tagged `parameters`."""

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from accelerate_nb.export.magics import Remark
from accelerate_nb.export.python_source import end_of

TAG = "parameters"
_SCALARS = ("int", "float", "bool", "str", "Path")
_MANY = {"list": "list", "List": "list", "Sequence": "list", "tuple": "tuple", "Tuple": "tuple"}
_CAN_BE = (
    "an option is an int, float, bool, str, None or Path, or a list or tuple of these; set the rest in another cell"
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option of a script: `--learning-rate` for `learning_rate = 1e-3  # how far a step goes`."""

    name: str
    type: str  # `float`, `list[int]`, `str | None`: as an annotation spells it
    default: str  # as the cell spells it
    help: str = ""


def parameters_of(source: str) -> tuple[tuple[Parameter, ...], tuple[Remark, ...]]:
    """The options that a cell's assignments are (`epochs: int = 3  # how often`), and what of the cell can't be one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = {token.start[0]: token.string.lstrip("#: ").rstrip() for token in tokens if token.type == tokenize.COMMENT}
    # Colab's `#@param {type: "number"}` describes a form field
    comments = {line: text for line, text in texts.items() if not text.startswith("@param")}
    found: dict[str, Parameter] = {}
    problems: list[Remark] = []
    for node in ast.parse(source).body:
        try:
            found.update({item.name: item for item in _of_statement(node, source, comments.get(end_of(node)[0], ""))})
        except _NoOptionError as error:
            problems.append(Remark(node.lineno, f"{error}: {_CAN_BE}"))
    return tuple(found.values()), (*problems, *_clashes(source, found))


class _NoOptionError(Exception):
    """Why an assignment is no option."""


def _of_statement(node: ast.stmt, source: str, comment: str) -> Iterator[Parameter]:
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if any(isinstance(part, ast.Name) and part.id == "nb_shell" for part in ast.walk(node)):
        raise _NoOptionError("a magic or a command gives no option")
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        raise _NoOptionError(f"`{_short(node)}` assigns nothing")
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    literal = _type_of(node.value)
    if literal is None:
        raise _NoOptionError(f"the value of `{_short(node)}` is no literal")
    type_name, help_text = _annotated(node.annotation, literal) if isinstance(node, ast.AnnAssign) else (literal, "")
    default = ast.get_source_segment(source, node.value) or ""
    default = ast.unparse(node.value) if "\n" in default else default
    for target in targets:
        if not isinstance(target, ast.Name):
            raise _NoOptionError(f"`{_short(node)}` gives no single name a value")
        yield Parameter(target.id, type_name, default, help_text or comment)


def _clashes(source: str, found: dict[str, Parameter]) -> Iterator[Remark]:
    first = {node.id: node.lineno for node in reversed(list(ast.walk(ast.parse(source)))) if isinstance(node, ast.Name)}
    flag_of = {name: name.replace("_", "-").strip("-") for name in found}
    flags = {flag: name for name, flag in flag_of.items()}
    for name, flag in flag_of.items():
        other = flags.get(flag.removeprefix("no-"), "")
        if not flag:
            text = f"`{name}` has no letter or digit that an option could be named after; give it another name."
        elif flag == "help":
            text = "`--help` lists the options, so it can be none of them; give `help` another name."
        elif flags[flag] != name:
            text = f"`{name}` and `{flags[flag]}` would be the same option; rename one."
        elif flag.startswith("no-") and other and found[other].type.startswith("bool"):
            text = f"`--{flag}` is how `{other}` is turned off; give `{name}` another name."
        else:
            continue
        yield Remark(first[name], text)


def _type_of(value: ast.expr) -> str | None:
    """The type of a literal; None for what isn't one."""
    match value:
        case ast.Constant(value=None):
            return "str | None"
        case ast.Constant(value=constant):
            return name if (name := type(constant).__name__) in _SCALARS else None
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return number if (number := _type_of(operand)) in ("int", "float") else None
        case ast.BinOp(left=left, right=right):
            return _type_of_sum(value, _type_of(left), _type_of(right))
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            types = {_type_of(element) for element in elements}
            return _collection(type(value).__name__.lower(), {"float"} if types == {"int", "float"} else types)
        case ast.Call(func=function, args=args, keywords=[]) if ast.unparse(function) in ("Path", "pathlib.Path"):
            return "Path" if all(_type_of(arg) in ("str", "Path") for arg in args) else None
    return None


def _type_of_sum(value: ast.BinOp, left: str | None, right: str | None) -> str | None:
    if left == "Path" and isinstance(value.op, ast.Div):
        return "Path" if right in ("str", "Path") else None
    if left == right == "str" and isinstance(value.op, ast.Add):
        return "str"
    if not {left, right} <= {"int", "float"}:
        return None
    below_one = isinstance(value.op, ast.Pow) and isinstance(value.right, ast.UnaryOp)
    return "float" if "float" in (left, right) or isinstance(value.op, ast.Div) or below_one else "int"


def _collection(kind: str, types: set[str | None]) -> str | None:
    """The type of a list or a tuple of values of one type; without values, it is one of texts."""
    of, *others = types or {"str"}
    if others or of not in _SCALARS:
        return None
    return f"{kind}[{of}]" if kind == "list" else f"{kind}[{of}, ...]"


def _annotated(annotation: ast.expr, literal: str) -> tuple[str, str]:
    """The type of an annotation, and the help that it may hold."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return _annotated(ast.parse(annotation.value, mode="eval").body, literal)
        except SyntaxError:
            raise _NoOptionError(f"{annotation.value!r} is no type of an option") from None
    name, arguments = _subscript(annotation)
    if name == "Annotated" and arguments:
        constants = (argument.value for argument in arguments[1:] if isinstance(argument, ast.Constant))
        return _annotated(arguments[0], literal)[0], next((text for text in constants if isinstance(text, str)), "")
    if name == "Final":
        return _annotated(arguments[0], literal) if arguments else (literal, "")
    spelled = _spelled(annotation)
    if spelled is None:
        raise _NoOptionError(f"`{ast.unparse(annotation)}` is no type of an option")
    # `name: str = None` is how many people spell an optional one
    optional = literal == "str | None" and not spelled.endswith(" | None")
    return (f"{spelled} | None" if optional else spelled), ""


def _spelled(annotation: ast.expr) -> str | None:
    name, arguments = _subscript(annotation)
    if name in _SCALARS and not arguments:
        return name
    if name in ("Any", "object") and not arguments:
        return "str"
    if name in _MANY:
        return _collection(_MANY[name], {_spelled(item) for item in arguments if ast.unparse(item) != "..."})
    if name == "Literal" and arguments and None not in map(_type_of, arguments):
        return f"Literal[{', '.join(map(ast.unparse, arguments))}]"
    every = [*arguments] if name in ("Optional", "Union") else []
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        every = [annotation.left, annotation.right]
    some = [item for item in every if not (isinstance(item, ast.Constant) and item.value is None)]
    spelled = _spelled(some[0]) if len(some) == 1 else None
    return None if spelled is None or (name != "Optional" and len(some) == len(every)) else f"{spelled} | None"


def _subscript(annotation: ast.expr) -> tuple[str, Sequence[ast.expr]]:
    """`("list", [int])` of `typing.list[int]`."""
    if not isinstance(annotation, ast.Subscript):
        return ast.unparse(annotation).rpartition(".")[2], ()
    inside = annotation.slice
    return _subscript(annotation.value)[0], inside.elts if isinstance(inside, ast.Tuple) else [inside]


def _short(node: ast.stmt) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 60 else f"{text[:57]}..."
