"""The source and the arguments of a run are kept as text."""

import linecache
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.launching.launcher import prepare
from accelerate_nb.launching.run import FrontEnd, Run
from accelerate_nb.notebook.api import resolved
from accelerate_nb.sources import run_source
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.sources.run_source import (
    _VALUES,
    SourcePart,
    as_text,
    call_lines,
    keep_source,
    kept_source,
    parts_of,
    source_parts,
    values_of,
    word_lines,
)
from accelerate_nb.worker.program import Program, ScriptFile

DEFINITION = ["# my training\n", "def train(lr):\n", "    return lr\n"]
LAUNCH = ["launch(train, args=(0.1,))\n"]


@pytest.fixture
def cells() -> Iterator[tuple[Any, CellSources]]:
    """A function of a cell, and the notebook's sources."""
    lines = {"<cell 1>": DEFINITION, "<cell 2>": LAUNCH}
    for name, text in lines.items():
        linecache.cache[name] = (10, None, text, name)
    names: dict[str, Any] = {}
    exec(compile("".join(DEFINITION), "<cell 1>", "exec"), names)
    yield names["train"], CellSources(lines, {"<cell 1>": 1, "<cell 2>": 2})
    for name in lines:
        linecache.cache.pop(name, None)


def test_a_notebook_keeps_the_cells_of_the_function_and_of_the_launch(tmp_path: Path, cells: Any) -> None:
    train, sources = cells
    assert kept_source(tmp_path) == ()
    keep_source(tmp_path, train, (0.1,), sources)
    assert kept_source(tmp_path) == (
        SourcePart("arguments", "arguments of train", "lr = 0.1\n"),
        SourcePart("function", "Cell In[1]", "".join(DEFINITION)),
        SourcePart("launch", "Cell In[2]", "".join(LAUNCH)),
    )
    assert (tmp_path / "source.txt").read_text().startswith("# -------- arguments: arguments of train\nlr = 0.1\n")


def test_a_cell_that_defines_and_launches_is_kept_once(cells: Any) -> None:
    train, _ = cells
    alone = CellSources({"<cell 1>": DEFINITION}, {"<cell 1>": 1})
    assert [part.role for part in source_parts(train, (0.1,), alone)] == ["arguments", "function"]


def test_a_script_is_kept_with_its_path(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    program = Program(ScriptFile(str(script), "train.py"), ("--lr", "0.1"))
    assert source_parts(program, (), CellSources({}, {})) == (
        SourcePart("arguments", f"arguments of {program.__name__}", "--lr = 0.1\n"),
        SourcePart("script", "train.py", "print('hello')\n"),
    )


class _AnswersToEveryName:
    def __getattr__(self, name: str) -> Any:
        return lambda: name

    def __call__(self) -> None:
        pass


def test_a_callable_that_answers_to_every_name_has_no_text_of_its_own() -> None:
    function = _AnswersToEveryName()
    assert "source_parts" not in source_parts(function, (0.1,), CellSources({}, {}))


def test_long_source_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source, "SIZE_LIMIT", 1000)
    text = as_text((SourcePart("launch", "Cell In[1]", "é = 1\n" * 1000),))
    assert 900 < len(text.encode()) <= 1000
    assert text.endswith("the rest was not kept\n")
    assert parts_of(text)[0].text.startswith("é = 1\n")


def test_a_launch_keeps_the_function_that_it_ran(tmp_path: Path) -> None:
    config = resolved({"num_processes": 1, "cpu": True, "engine": "inline", "folder": str(tmp_path)}, None)
    run = Run(prepare(_hello, (), config), FrontEnd())
    run.start()
    (part,) = kept_source(run.folder)
    assert part.origin == __file__
    assert part.text.startswith("def _hello() -> str:")


def _hello() -> str:
    return "hello"


def train(lr: float, *sizes: int, epochs: int = 3, api_token: str = "", **options: Any) -> None:
    """Does nothing."""


class Opaque:
    """Has a text that must not be asked for."""

    def __repr__(self) -> str:
        raise AssertionError("this may be long, or wake a device")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("arrays compare each element, and refuse other shapes")

    __hash__ = None  # type: ignore[assignment]  # as arrays are


def test_arguments_have_their_parameters_names_and_defaults_are_among_them() -> None:
    lines = call_lines(partial(train, 0.1, mode="fast"), (8, 16))
    known = {"lr": "0.1", "sizes": "(8, 16)", "epochs": "3", "api_token": "(not kept)", "mode": "'fast'"}
    assert values_of(lines) == known


def test_of_other_than_plain_values_the_type_is_kept() -> None:
    assert call_lines(lambda model: None, (Opaque(),)) == "model = <Opaque>\n"
    lines = call_lines(train, ({"model": Opaque(), "optimizer": Opaque, "where": Path("data"), "on": True, "x": None},))
    kept = "{'model': <Opaque>, 'on': True, 'optimizer': <Opaque>, 'where': PosixPath('data'), 'x': None}"
    assert values_of(lines)["lr"] == kept


def test_values_are_bounded_and_on_one_line() -> None:
    lines = call_lines(train, ("a\nb" * 10_000, *range(10_000)))
    assert len(lines.splitlines()) == 4
    assert len(lines) < 1000


def test_large_arguments_cost_a_launch_nothing() -> None:
    class Vocabulary(dict):  # type: ignore[type-arg]
        """Counts the entries that were looked at."""

        looked_at = 0

        def items(self) -> Any:
            for entry in super().items():
                self.looked_at += 1
                yield entry

    vocabulary = Vocabulary((str(number), number) for number in range(10_000))
    assert _VALUES.repr_dict(vocabulary, 1).endswith("...}")
    assert vocabulary.looked_at < 100
    assert values_of(call_lines(train, ({str(number) for number in range(10_000)},)))["lr"].endswith("...}")
    # Python writes no integer of more than 4,300 digits
    assert values_of(call_lines(train, (10**5000,)))["lr"] == "<int>"


def test_secrets_are_not_kept() -> None:
    lines = call_lines(train, ({"password": "1234", "size": 3},))
    lines += word_lines(["--hub_token", "1234", "--api-key=1234"])
    assert "1234" not in lines
    assert lines.count("(not kept)") == 4  # api_token, too


def test_a_call_that_does_not_fit_is_kept_as_it_is() -> None:
    assert call_lines(lambda: None, (1,)) == "args[0] = 1\n"


def test_words_of_a_command_line_are_under_their_options() -> None:
    assert word_lines(["data", "--lr", "0.1", "--size=3", "--verbose", "-n", "1", "2"]) == (
        "words = data\n--lr = 0.1\n--size = 3\n--verbose = yes\n-n = 1 2\n"
    )
