"""The panel's modules as the one module that a widget is made of."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_NAME = re.compile(r"^(?:export )?(?:async )?(?:function\*?|class|const|let|var) (\w+)", re.MULTILINE)
# Lines that neither of them reads: other forms of import or export, or destructured names.
_STRANGE = re.compile(r"^(?:import\b|export \{|export \*|(?:export )?(?:const|let|var) [^\w]).*", re.MULTILINE)


@cache
def module(entry: str = "panel") -> str:
    """A widget as one ES module without imports: the panel, with `mount` and what its modules export, or another."""
    return joined(sources(), entry)


def sources() -> dict[str, str]:
    """The text of each module, by its name; the vendored chart library is one of them."""
    found = (file for file in files(__package__).iterdir() if file.name.endswith(".js"))
    library = _vendored("uPlot.iife.min.js").replace("\nvar uPlot=", "\nexport const uPlot=", 1)
    return {**{file.name.removesuffix(".js"): file.read_text(encoding="utf-8") for file in found}, "uplot": library}


@cache
def style() -> str:
    """The style sheet of the panel, with that of its charts."""
    return _vendored("uPlot.min.css") + files(__package__).joinpath("panel.css").read_text(encoding="utf-8")


def _vendored(name: str) -> str:
    return files(__package__).joinpath("vendor", name).read_text(encoding="utf-8")


def joined(modules: Mapping[str, str], entry: str) -> str:
    """
    Modules as one: those that `entry` needs, each after what it imports, its top-level names beside those of the others.

    Raises `ValueError` where two of them use a name at their top, or one imports what there is not.
    """
    order = _order(modules, entry, ())
    owners: dict[str, str] = {}
    for name in order:
        # every import is of a name that the other module exports, in the one form that is read here
        if strange := _STRANGE.search(_IMPORT.sub("", modules[name])):
            raise ValueError(
                f"{name}.js has the line {strange[0]!r}. Write imports as 'import {{ a, b }} from \"./module.js\";', "
                "exports and names at the top as 'export const a = …'."
            )
        for names, other in _IMPORT.findall(modules[name]):
            if unknown := {*re.findall(r"[^\s,]+", names)} - {*_EXPORT.findall(modules[other])}:
                missing = ", ".join(sorted(unknown))
                raise ValueError(f"{name}.js imports {missing} from {other}.js, which does not export it.")
        for item in _NAME.findall(modules[name]):
            if (owner := owners.setdefault(item, name)) != name:
                both = f"{owner}.js and {name}.js both have {item} at their top"
                raise ValueError(f"{both}. Give one of them another name.")
    exports = [element for name in order for element in _EXPORT.findall(modules[name])]
    parts = [_EXPORT.sub("", _IMPORT.sub("", modules[name])).strip() for name in order]
    return "\n\n".join([*parts, f"export {{ {', '.join(exports)} }};\n"])


def _order(modules: Mapping[str, str], name: str, above: tuple[str, ...]) -> list[str]:
    """A module after all that it imports, each once."""
    if name in above:
        cycle = " > ".join([*above, name])
        raise ValueError(f"modules import each other: {cycle}. Move what both need to a third one.")
    if name not in modules:
        raise ValueError(f"{above[-1] if above else 'the page'} imports {name}.js, and there is no such module.")
    found: dict[str, None] = {}
    for _, other in _IMPORT.findall(modules[name]):
        found.update(dict.fromkeys(_order(modules, other, (*above, name))))
    return [*found, name]
