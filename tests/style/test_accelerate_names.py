"""Every public name of Accelerate is offered under the same import path with the same parameters, or is listed with the reason why not."""

import functools
import inspect
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.processes import python
from tests.style.source_files import ROOT

FACTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("accelerate_names.json").read_bytes())["modules"]
LIST = ROOT / "docs" / "not_offered.md"


def not_offered(page: str) -> dict[str, str]:
    """The patterns of the list with their reasons: the rows of its tables."""
    return dict(re.findall(r"^\| *`([^`]+)` *\| *(.+?) *\|$", page, flags=re.MULTILINE))


@functools.cache
def all_missing() -> list[str]:
    """What Accelerate's modules have and ours haven't: names, members of classes (`A.b`), parameters (`A.b(c)`)."""
    return [name for path in FACTS for name in missing(path)]


def missing(path: str) -> Iterator[str]:
    """What is missing in a module."""
    try:
        ours = import_module(path.replace("accelerate", "accelerate_nb", 1))
    except ModuleNotFoundError:
        ours = None
    for name, facts in FACTS[path].items():
        if not hasattr(ours, name):
            yield f"{path}.{name}"
        elif "parameters" in facts:
            yield from wrong_parameters(f"{path}.{name}", getattr(ours, name), facts["parameters"])
        else:
            yield from wrong_members(f"{path}.{name}", getattr(ours, name), facts.get("members", {}))


def wrong_members(name: str, ours: Any, members: dict[str, Any]) -> Iterator[str]:
    """The members that a class of ours lacks."""
    for member, facts in members.items():
        if not has_member(ours, member):
            yield f"{name}.{member}"
        elif isinstance(facts, list):
            yield from wrong_parameters(f"{name}.{member}", getattr(ours, member), facts)


def has_member(ours: Any, member: str) -> bool:
    """Whether the instances of a class have a member: the class itself has it, or says that they do."""
    return hasattr(ours, member) or any(member in inspect.get_annotations(item) for item in ours.__mro__)


def wrong_parameters(name: str, ours: Any, theirs: list[str]) -> Iterator[str]:
    """
    The parameters that a function of ours lacks, wants where Accelerate's doesn't, or has in another order.

    The file of facts marks a parameter with a default by `=`, and doesn't tell `*args` from `args`.
    """
    wanted = [their.rstrip("=") for their in theirs if their not in {"self", "cls"}]
    if wanted and set(wanted) <= {"args", "kwargs"}:
        return  # a decorator of Accelerate's hides what the function takes
    our_parameters = {item.name: item for item in inspect.signature(ours).parameters.values() if item.name != "self"}
    takes_more = any(item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD) for item in our_parameters.values())
    for parameter_name in wanted:
        if parameter_name not in our_parameters and not (takes_more and parameter_name.endswith("args")):
            yield f"{name}({parameter_name})"
    optional = {their[:-1] for their in theirs if their.endswith("=")}
    for parameter_name, item in our_parameters.items():
        needed = item.default is item.empty and item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
        if needed and (parameter_name in optional or parameter_name not in wanted):
            yield f"{name}({parameter_name}: needed here, optional there)"
    places = [wanted.index(parameter) for parameter in our_parameters if parameter in wanted]
    if places != sorted(places):
        yield f"{name}(parameters in another order)"


def listed(name: str, patterns: Any) -> bool:
    """Whether one of the patterns is the name's, or that of the class or function that it belongs to."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}[.(]*") for pattern in patterns)


def test_every_module_offers_what_accelerates_does() -> None:
    known = not_offered(LIST.read_text(encoding="utf-8"))
    unknown = [name for name in all_missing() if not listed(name, known)]
    assert not unknown, f"neither offered nor in {LIST.name}:\n  " + "\n  ".join(unknown)


def test_what_is_listed_as_not_offered_is_not_there() -> None:
    gone = all_missing()
    patterns = not_offered(LIST.read_text(encoding="utf-8"))
    assert [pattern for pattern in patterns if not any(listed(name, [pattern]) for name in gone)] == []


MODULES = """
from importlib import import_module
from types import ModuleType
def walk(module, path):
    for name, item in list(vars(module).items()):
        inner = f"{path}.{name}"
        if isinstance(item, ModuleType) and item.__name__ == inner:
            print(inner)
            walk(item, inner)
walk(import_module("accelerate"), "accelerate")
"""
ATTRIBUTES = """
import sys
from functools import reduce
import accelerate_nb
assert "torch" not in sys.modules
for path in sys.argv[1:]:
    try:
        reduce(getattr, path.split(".")[1:], accelerate_nb)
    except AttributeError:
        print(path)
"""


@pytest.mark.slow
def test_import_of_the_package_alone_offers_the_modules_that_it_does_in_accelerate() -> None:
    theirs = printed(MODULES)
    assert "accelerate.utils.operations" in theirs
    known = not_offered(LIST.read_text(encoding="utf-8"))
    assert [path for path in printed(ATTRIBUTES, *theirs) if not listed(path, known)] == []


def printed(script: str, *arguments: str) -> list[str]:
    """The lines that a Python prints which has imported nothing yet."""
    return python("-c", script, *arguments, check=True).stdout.split()
