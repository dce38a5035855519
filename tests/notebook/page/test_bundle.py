"""The panel's modules, joined."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from accelerate_nb.notebook.page import bundle
from accelerate_nb.notebook.page.minified import minified


def test_each_module_stands_once_behind_what_it_imports() -> None:
    modules = {
        "top": 'import { a } from "./left.js";\nimport { b } from "./right.js";\n\nexport const top = a + b;\n',
        "left": 'import {\n  base,\n} from "./base.js";\nexport function a() {}\nexport default 1;\n',
        "right": 'import { base } from "./base.js";\nconst own = 2;\nexport class b {}\n',
        "base": "// first\nexport const base = 1;\n",
        "alone": "export const alone = 1;\n",
    }
    assert bundle.joined(modules, "top") == (
        "// first\nconst base = 1;\n\nfunction a() {}\nexport default 1;\n\nconst own = 2;\nclass b {}\n\n"
        "const top = a + b;\n\nexport { base, a, b, top };\n"
    )


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"top": 'import { b } from "./b.js";\nconst one = 1;\n', "b": "export const b = 1;\nfunction one() {}\n"}, "both have one"),
        ({"top": 'import { c } from "./b.js";\n', "b": "export const b = 1;\n"}, "imports c from b.js"),
        ({"top": 'import { c } from "./c.js";\n'}, "no such module"),
        ({"top": 'import { b } from "./b.js";\n', "b": 'import { a } from "./top.js";\n'}, "top > b > top"),
        ({"top": 'import * as b from "https://example.org/b.js";\n'}, "has the line"),
        ({"top": "export { one };\n"}, "has the line"),
        ({"top": "const { one, two } = three;\n"}, "has the line"),
    ],
)  # fmt: skip
def test_what_can_not_be_joined_is_refused(modules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bundle.joined(modules, "top")


def test_the_panel_is_one_module_that_imports_nothing() -> None:
    module = bundle.module()
    assert not re.search(r"^import\b", module, re.MULTILINE)
    assert module.count("export default ") == 1
    assert re.search(r"^export \{.*\bmount\b.*\};$", module, re.MULTILINE)
    assert ".anb {" in bundle.style()


def test_a_saved_report_holds_the_module_minified() -> None:
    bare = bundle.bare_module()
    assert len(bare) < 0.7 * len(bundle.module())
    # what needs a kernel is left out
    assert "function mount(" in bare
    assert "initialize" not in bare


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("// first\nconst one = 1; /* more */\nexport { one };", "let one=1;export{one};"),
        ("const far = 1;\nfunction f(near, far) {\n  return near + far;\n}", "let ab=1;function aa(a,ab){return a+ab}"),
        ("function f({ a, b: c, d = 2 }) { return { a, c, d }; }", "function aa({a,b:b,d:c=2}){return{a,c:b,d:c}}"),
        ("class A { add(x) { this.x = x; return x - -x; } get x() { return X; } }", "class aa{add(a){this.x=a;return a- -a}get x(){return X}}"),
        ("const f = (x) => `${x} of ${g({ x })} x`;", "let aa=(a)=>`${a} of ${g({x:a})} x`;"),
        ("const f = (x) => x.split(/[/x]/).length / x;", "let aa=(a)=>a.split(/[/x]/).length/a;"),
        ("const f = (g) => { if (g) for (const x of g) x(window); }", "let aa=(a)=>{if(a)for(let b of a)b(window);}"),
        ("const a = 1\nconst b = a\n  .c;", "let aa=1\nlet ab=aa.c;"),
    ],
)  # fmt: skip
def test_names_of_variables_are_short_and_those_of_properties_and_of_the_browser_stay(source: str, made: str) -> None:
    assert minified(source, ["one"]) == made


def test_the_style_of_a_saved_report_is_the_same() -> None:
    bare = bundle.bare_style()
    assert len(bare) < len(bundle.style())
    whole = (files(bundle.__package__) / "panel.css").read_text(encoding="utf-8")
    assert bare.count("{") == whole.count("{") == bare.count("}")
    assert whole in bundle.style()
    assert "  " not in bare
    # a space may be an ancestor's
    assert ".anb :focus-visible{" in bare


def test_every_module_opens_with_what_it_is() -> None:
    for name, text in bundle.sources().items():
        assert re.match(r"// [A-Z][^\n]*[.]\n", text), name
        assert len(text.splitlines()) < 600, name
