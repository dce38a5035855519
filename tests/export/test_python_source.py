"""What a cell does is guarded, what it defines is not, and its lines keep their text."""

from __future__ import annotations

import ast

import pytest

from accelerate_nb.export.python_source import DefinitionFinder, guarded, is_async, with_global_annotations

GUARD = 'if __name__ == "__main__":  # +'


def laid_out(source: str, definitions: DefinitionFinder | None = None) -> list[str]:
    return guarded(source, 1, definitions or DefinitionFinder())


@pytest.mark.parametrize(
    "source",
    [
        *("import os", "from a import b, c as d"),
        *("def f(x=1):\n    return g(x)", "async def f(): pass", "@decorate\nclass A(B):\n    x = make()"),
        *("x = 1", "x: int = 3\ny: str", "x, y = 1, -2.5", "shape = (2, [3], {'a': {4}})", "make = lambda: work()"),
        *("'''a text'''", "data = Path('a') / 'b'", "T = typing.TypeVar('T')"),
        "try:\n    import a\nexcept ImportError:\n    a = None",
        "if TYPE_CHECKING:\n    import a\nelse:\n    b = 1",
        *("layer = nn.Linear", "# only a comment", ""),
    ],
)
def test_definitions_stand_as_they_are(source):
    assert laid_out(source) == source.split("\n")


@pytest.mark.parametrize(
    "source",
    [
        *("print(1)", "x = f()", "x = [f(y) for y in z]", "x += 1", "x[0] = 1", "os.environ['A'] = '1'"),
        *(
            "for x in y: pass",
            "del x",
            "assert x",
            "if __name__ == '__main__':\n    x = 1",
            "if x: f()",
            "with a: pass",
        ),
        *("x = (y := 3)", "try:\n    import a\nexcept ImportError:\n    install()", "x = 1; f(x)"),
    ],
)
def test_work_is_guarded(source):
    assert laid_out(source) == [GUARD, *(f"    {line}" for line in source.split("\n"))]


def test_statements_stay_in_their_order_and_share_guards():
    source = "import os\n\n# why\nprint(1)\n\n# and\nprint(2)\n# here is f\ndef f(): pass\nf()\n# the end"
    assert laid_out(source) == [
        *("import os", ""),
        *(GUARD, "    # why", "    print(1)", "", "    # and", "    print(2)"),
        *("# here is f", "def f(): pass"),
        *(GUARD, "    f()", "# the end"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("'''a\n  b\n\tc'''", "f'''a\n {x}\n  b'''", "b'''a\nb'''", "'a\\\nb'"),
        *("f'{x}' '''\n  a'''", "f'''{f'''{x}'''}\n b'''"),
    ],
)
def test_texts_of_several_lines_keep_their_text(text):
    source = f"x = 3\nshow(\n{text},\n  2)"
    try:
        ast.parse(source)
    except SyntaxError:
        pytest.skip("this Python has no such texts")
    calls: list[object] = []
    exec("\n".join(laid_out(source)), {"__name__": "__main__", "show": lambda *values: calls.append(values)})
    assert calls == [(eval(text, {"x": 3}), 2)]


def test_tabs_and_spaces_go_on_to_mean_the_same():
    source = "for x in (1, 2):\n\tif x == 1:\n\t    numbers.append(x)\n\telse:\n\t\tnumbers.append(-x)\nif numbers:\n  numbers.append(9)"
    numbers: list[int] = []
    exec("\n".join(laid_out(source)), {"__name__": "__main__", "numbers": numbers})
    assert numbers == [1, -2, 9]


@pytest.mark.parametrize(
    "needs",
    [
        *("def g(x=data): pass", "@data\ndef g(): pass", "def g(x: data): pass", "class A(data): pass"),
        *("class A:\n    n = len(data)", "class A:\n    def f(self, x=data): pass"),
        *("y = data", "y = data.shape[0]", "class A:\n    x = count()", "@twice\ndef g(): pass"),
    ],
)
def test_what_needs_guarded_values_is_guarded_too(needs):
    before = "data = load()\ndef count():\n    return len(data)\ndef twice(f):\n    count()\n    return f\n"
    lines = laid_out(before + needs)
    assert lines[lines.index("    return f") + 1] == GUARD
    # a process that imports the script has nothing that fails
    exec("\n".join(lines), {"__name__": "__mp_main__"})


@pytest.mark.parametrize(
    "independent",
    [
        *("def g():\n    return data", "class A:\n    def f(self):\n        return data"),
        *("class A:\n    data = 3\n    other = data", "g = lambda: data", "data = 3"),
    ],
)
def test_what_needs_them_only_when_it_is_called_is_not_guarded(independent):
    definitions = DefinitionFinder()
    laid_out("data = load()", definitions)
    assert laid_out(independent, definitions) == independent.split("\n")


def test_a_name_that_is_given_a_plain_value_again_is_there_for_everyone():
    definitions = DefinitionFinder()
    laid_out("data = load()\ndata = 3", definitions)
    assert laid_out("y = data", definitions) == ["y = data"]


def test_an_import_that_shares_its_line_with_work_is_there_for_everyone():
    assert laid_out("import torch; torch.manual_seed(0)\nclass A(torch.nn.Module): pass") == [
        "import torch  # +",
        GUARD,
        "    import torch; torch.manual_seed(0)",
        "class A(torch.nn.Module): pass",
    ]


def test_a_line_that_looks_like_an_added_one_does_so_no_more():
    assert laid_out("x = 1  # +\nf(x)  # +") == ["x = 1  # + ", GUARD, "    f(x)  # + "]


def test_annotations_that_a_function_can_t_make_keep_the_cell_s_lines():
    source = "await f()\nx: dict[\n    str, int,\n] = g()\ny: int\nprint(x)"
    plain = with_global_annotations(source)
    assert plain.split("\n")[0] == "await f()"
    assert len(plain.split("\n")) == len(source.split("\n"))
    assert with_global_annotations("x: int = f()") == "x: int = f()"


def test_what_awaits_only_in_functions_is_not_asynchronous():
    tree = ast.parse("async def f():\n    await g()\nx = f()\nclass A:\n    async def f(self): await g()")
    assert not is_async(tree.body)
