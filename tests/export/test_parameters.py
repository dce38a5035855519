"""The assignments of a `parameters` cell are options, and what can't be one is named."""

import pytest

from accelerate_nb.errors import ExportError
from accelerate_nb.export.parameters import Parameter, parameters_of
from tests.export.making import code, script

TYPES = {
    "int": ["a = 3", "a = -3", "a = 64 * 1024", "a: Final = 3"],
    "float": ["a = 1e-3", "a = 1 / 3", "a = 10 ** -3", "a = 2 * 1.5", "a: float = 1", "a: Final[float] = 3"],
    "bool": ["a = True"],
    "str": ["a = 'text'", "a = 'te' + 'xt'", "a: Any = 'x'"],
    "str | None": ["a = None", "a: typing.Union[None, str] = None"],
    "int | None": ["a: int = None", "a: int | None = 3"],
    "list[int]": ["a = [1, 2]", "a: list[int] = []"],
    "list[float]": ["a = [1, 2.5]", "a: 'Sequence[float]' = [1]"],
    "list[str]": ["a = []", "a: list = []"],
    "tuple[int, ...]": ["a = (1, 2)", "a: tuple[int, int] = (1, 2)"],
    "Path": ["a = Path('data')", "a = pathlib.Path('data') / 'train'"],
    "Path | None": ["a: Optional[Path] = None"],
    "Literal['x', 'y']": ["a: Literal['x', 'y'] = 'x'"],
}


@pytest.mark.parametrize(("value_type", "source"), [(name, source) for name in TYPES for source in TYPES[name]])
def test_the_type_comes_from_the_annotation_or_the_value(value_type, source):
    found, problems = parameters_of(source)
    assert problems == ()
    assert [(item.name, item.type) for item in found] == [("a", value_type)]


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
    assert parameters_of(source)[0] == (
        Parameter("rate", "float", "1e-3", "learning rate"),
        Parameter("sizes", "list[int]", "[8, 9]", "layers # and more"),
        Parameter("name", "str", '"a"', "of the run"),
        Parameter("quiet", "bool", "False", ""),
    )


NO_OPTIONS = {
    "is no literal": ["a = {'b': 1}", "a = [1, 'x']", "a = [[1]]", "a = 1j", "a = f'{b}'"],
    "the value of `steps = epochs * 2` is no literal": ["epochs = 3\nsteps = epochs * 2"],
    "the value of `a = load()` is no literal": ["a = load()"],
    "gives no single name a value": ["a, b = 1, 2", "a.b = 1"],
    "`dict` is no type of an option": ["a: dict = None"],
    "'a b!' is no type of an option": ["a: 'a b!' = 3"],
    "`Literal[foo]` is no type of an option": ["a: Literal[foo] = 3"],
    "`list[list[int]]` is no type": ["a: list[list[int]] = []"],
    "`print(1)` assigns nothing": ["print(1)"],
    "`a: int` assigns nothing": ["a: int"],
    "`--help` lists the options": ["help = 3"],
    "`--no-cache` is how `cache` is turned off": ["no_cache = 1\ncache = True"],
    "would be the same option": ["_a = 1\na = 2"],
    "`_` has no letter or digit that an option could be named after; give it another name.": ["_ = 1"],
}


@pytest.mark.parametrize(("message", "source"), [(text, source) for text in NO_OPTIONS for source in NO_OPTIONS[text]])
def test_what_can_be_no_option_is_named_with_its_line(message, source):
    (problem,) = parameters_of(source)[1]
    assert message in problem.text
    assert problem.line in (1, len(source.split("\n")))


def test_an_export_names_cell_and_line_of_all_of_them(tmp_path):
    with pytest.raises(ExportError) as caught:
        script(tmp_path, "import os", code("a = 1\nb = os.sep\nc = {}", "parameters"), code("d = 1", "parameters"))
    assert "train.ipynb, cell 2, line 2: the value of `b = os.sep` is no literal: an option is" in str(caught.value)
    assert "train.ipynb, cell 2, line 3: " in str(caught.value)
    assert "train.ipynb, cell 3, line 1: cell 2 is tagged `parameters` already" in str(caught.value)


@pytest.mark.parametrize("source", ["%%time\na = 1", "a = !ls"])
def test_a_magic_is_named_as_one_where_it_can_be_no_option(tmp_path, source):
    with pytest.raises(ExportError) as caught:
        script(tmp_path, code(source, "parameters"))
    assert "train.ipynb, cell 1, line 1: a magic or a command gives no option: an option is" in str(caught.value)


def test_a_script_lists_its_options(tmp_path):
    found = script(tmp_path, code("a = 1  # one", "parameters")).parameters
    assert found == (Parameter("a", "int", "1", "one"),)
    assert script(tmp_path, "a = 1").parameters == ()


def test_what_colab_draws_a_field_from_is_no_help():
    source = 'rate = 0.1 #@param {type:"number"}\nkind = "a" # @param ["a", "b"]\nname = "x"  # what it is called'
    assert [item.help for item in parameters_of(source)[0]] == ["", "", "what it is called"]
