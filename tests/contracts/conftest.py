"""The places that keep one contract, each in its turn, and cells of a notebook without one."""

import linecache
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.contracts.places import SESSIONS, STARTS, Engine, SessionExecutor, executor_of, process_environment


@pytest.fixture(params=STARTS, scope="module")
def engine(request, tmp_path_factory) -> Iterator[Engine]:
    """Each engine in its turn, awake already."""
    _can_be(request.param)
    made = executor_of(request.param, tmp_path_factory.mktemp(f"runs_{request.param}"))
    assert isinstance(made, Engine)
    with process_environment(request.param):
        yield made


@pytest.fixture(params=[*STARTS, *SESSIONS], scope="module")
def executor(request, tmp_path_factory) -> Iterator[Engine | SessionExecutor]:
    """Each engine, and a session on each, in its turn."""
    _can_be(request.param)
    made = executor_of(request.param, tmp_path_factory.mktemp(f"runs_{request.param}"))
    with process_environment(request.param):
        yield made
        made.close()


@pytest.fixture
def apart(executor) -> Engine | SessionExecutor:
    """The executor, where it has processes of its own."""
    return _isolated(executor)


@pytest.fixture
def isolated(engine) -> Engine:
    """The engine, where it has processes of its own."""
    return _isolated(engine)


@pytest.fixture
def cell() -> Iterator[Any]:
    """Runs text as a notebook's cell: in `__main__`, with its lines known under a name that is no file."""
    main = sys.modules["__main__"]
    before = dict(vars(main))
    names = []

    def run(text: str) -> Any:
        name = f"<cell {len(names) + 1}>"
        names.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), vars(main))
        return main

    yield run
    vars(main).clear()
    vars(main).update(before)
    for name in names:
        linecache.cache.pop(name, None)


def _can_be(name):
    if "xla" in name and find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed here: `make test-tpu` has it")


def _isolated(executor):
    if not executor.isolated:
        pytest.skip(
            "the function runs in this very process: it can't be ended from outside, nor have another environment"
        )
    return executor
