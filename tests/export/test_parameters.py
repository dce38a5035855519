"""The assignments of a `parameters` cell are options, and what can't be one is named."""

import pytest

from accelerate_nb.errors import ExportError
from accelerate_nb.export.parameters import Parameter, parameters_of
from tests.export.making import code, script


@pytest.mark.parametrize(
    ("source", "value_type"),
    [
        ("a = 3", "int"),
        ("a = -3", "int"),
        ("a = 64 * 1024", "int"),
        ("a = 1e-3", "float"),
        ("a = 1 / 3", "float"),
        ("a = 10 ** -3", "float"),
        ("a = 2 * 1.5", "float"),
        ("a = True", "bool"),
        ("a = 'text'", "str"),
        ("a = 'te' + 'xt'", "str"),
        ("a = None", "str | None"),
        ("a = [1, 2]", "list[int]"),
        ("a = [1, 2.5]", "list[float]"),
        ("a = (1, 2)", "tuple[int, ...]"),
        ("a = []", "list[str]"),
        ("a = Path('data')", "Path"),
        ("a = pathlib.Path('data') / 'train'", "Path"),
        ("a: float = 1", "float"),
        ("a: int = None", "int | None"),
        ("a: int | None = 3", "int | None"),
        ("a: Optional[Path] = None", "Path | None"),
        ("a: typing.Union[None, str] = None", "str | None"),
        ("a: list[int] = []", "list[int]"),
        ("a: 'Sequence[float]' = [1]", "list[float]"),
        ("a: tuple[int, int] = (1, 2)", "tuple[int, ...]"),
        ("a: list = []", "list[str]"),
        ("a: Literal['x', 'y'] = 'x'", "Literal['x', 'y']"),
        ("a: Final = 3", "int"),
        ("a: Final[float] = 3", "float"),
        ("a: Any = 'x'", "str"),
    ],
)
def test_the_type_comes_from_the_annotation_or_the_value(source, value_type):
    found = parameters_of(source)
    assert found.problems == ()
    assert [(item.name, item.type) for item in found.found] == [("a", value_type)]


def test_help_comes_from_the_comment_or_the_annotation():
    source = """
# settings
from pathlib import Path
rate = 1e-3  # learning rate
sizes = [
    8,  # small
    9,
]  #: layers # and more
name: Annotated[str, "of the run"] = "a"
quiet = False
"""
    assert parameters_of(source).found == (
        Parameter("rate", "float", "1e-3", "learning rate"),
        Parameter("sizes", "list[int]", "[8, 9]", "layers # and more"),
        Parameter("name", "str", '"a"', "of the run"),
        Parameter("quiet", "bool", "False", ""),
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a = load()", "the value of `a = load()` is no literal"),
        ("a = {'b': 1}", "is no literal"),
        ("a = [1, 'x']", "is no literal"),
        ("a = [[1]]", "is no literal"),
        ("a = 1j", "is no literal"),
        ("a = f'{b}'", "is no literal"),
        ("epochs = 3\nsteps = epochs * 2", "is no literal"),
        ("a, b = 1, 2", "gives no single name a value"),
        ("a.b = 1", "gives no single name a value"),
        ("a: dict = None", "`dict` is no type of an option"),
        ("a: list[list[int]] = []", "`list[list[int]]` is no type"),
        ("print(1)", "`print(1)` assigns nothing"),
        ("a: int", "`a: int` assigns nothing"),
        ("help = 3", "`--help` lists the options"),
        ("no_cache = 1\ncache = True", "`--no-cache` is how `cache` is turned off"),
        ("_a = 1\na = 2", "would be the same option"),
    ],
)
def test_what_can_be_no_option_is_named_with_its_line(source, message):
    (problem,) = parameters_of(source).problems
    assert message in problem.text
    assert problem.line in (1, len(source.split("\n")))


def test_an_export_names_cell_and_line_of_all_of_them(tmp_path):
    with pytest.raises(ExportError) as caught:
        script(tmp_path, "import os", code("a = 1\nb = os.sep\nc = {}", "parameters"), code("d = 1", "parameters"))
    assert "train.ipynb, cell 2, line 2: the value of `b = os.sep` is no literal: an option is" in str(caught.value)
    assert "train.ipynb, cell 2, line 3: " in str(caught.value)
    assert "train.ipynb, cell 3, line 1: cell 2 is tagged `parameters` already" in str(caught.value)


def test_a_script_lists_its_options(tmp_path):
    found = script(tmp_path, code("a = 1  # one", "parameters")).parameters
    assert found == (Parameter("a", "int", "1", "one"),)
    assert script(tmp_path, "a = 1").parameters == ()


def test_what_colab_draws_a_field_from_is_no_help():
    source = 'rate = 0.1 #@param {type:"number"}\nkind = "a" # @param ["a", "b"]\nname = "x"  # what it is called'
    assert [item.help for item in parameters_of(source).found] == ["", "", "what it is called"]
