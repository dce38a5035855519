"""The panel's modules, joined."""

import re
from importlib.resources import files

import pytest

from accelerate_nb.notebook.page import bundle


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
        ({"top": "const { one, two } = three;\n"}, "has the line")
    ]
)  # fmt: skip
def test_what_can_not_be_joined_is_refused(modules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bundle.joined(modules, "top")


def test_the_panel_is_one_module_that_imports_nothing() -> None:
    module = bundle.module()
    assert not re.search(r"^import\b", module, re.MULTILINE)
    assert module.count("export default ") == 1
    assert ".anb {" in bundle.style()


def test_every_module_opens_with_what_it_is() -> None:
    for name, text in bundle.sources().items():
        if name == "uplot":
            continue
        assert re.match(r"// [A-Z][^\n]*[.]\n", text), name
        assert len(text.splitlines()) < 600, name


def test_the_chart_library_comes_with_its_licence_and_is_the_version_that_the_notice_names() -> None:
    vendor = files(bundle.__package__) / "vendor"
    notice = (vendor / "NOTICE").read_text(encoding="utf-8")
    (version,) = re.findall(r"^/\*! https://github.com/leeoniya/uPlot \(v([\d.]+)\) \*/", bundle.sources()["uplot"])
    assert f"uPlot {version}, " in notice
    assert "LICENSE.uPlot" in notice
    assert (vendor / "LICENSE.uPlot").read_text(encoding="utf-8").startswith("The MIT License (MIT)")
    # all that is joined is in what is published
    assert not re.search(r"\bimport\(|https?://(?!github\.com/leeoniya|www\.w3\.org)", bundle.module())
