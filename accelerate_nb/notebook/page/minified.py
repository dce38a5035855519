"""The panel's JavaScript with short names, and without what only its readers need: each saved report holds it."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<space>[ \n]+)|(?P<name>[A-Za-z_$][\w$]*)|(?P<number>\.?\d[\w.]*)"
    r"""|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<sign>\.\.\.|=>|\?\.(?!\d)|\+\+|--|&&|\|\||\?\?|.)""",
    re.DOTALL,
)
_REGEX = re.compile(r"/(?![/*])(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
# A text with holes: up to its end or its next hole.
_TEMPLATE = re.compile(r"[`}](?:[^`\\$]|\\.|\$(?!\{))*(?:`|\$\{)", re.DOTALL)
_VALUES = frozenset(["this", "super", "null", "true", "false"])
_KEYWORDS = _VALUES | frozenset(
    [
        "async",
        "await",
        "break",
        "case",
        "catch",
        "class",
        "const",
        "continue",
        "default",
        "delete",
        "do",
        "else",
        "export",
        "extends",
        "finally",
        "for",
        "function",
        "get",
        "if",
        "import",
        "in",
        "instanceof",
        "let",
        "new",
        "of",
        "return",
        "set",
        "static",
        "switch",
        "throw",
        "try",
        "typeof",
        "var",
        "void",
        "while",
        "yield",
    ]
)
# Behind these a value has ended: a slash divides, and the end of a line may end a statement.
_VALUE_ENDS = frozenset([")", "]", "}", "++", "--"])
# Before one of these, or behind one of the others, the end of a line ends nothing.
_GO_ON = frozenset([")", "]", "}", ",", ".", "?.", "?", ":", "=", "&&", "||", "??", "=>"])
# A brace behind one of these opens an object or a pattern, not a block.
_BEFORE_OBJECT = frozenset(
    ["(", ",", "=", "[", "?", ":", "return", "const", "let", "var", "...", "&&", "||", "??", "of", "in"]
)
_CONDITIONS = frozenset(["if", "for", "while", "switch"])
_LETTERS = string.ascii_lowercase + string.ascii_uppercase


class _Token(NamedTuple):
    """A word, a sign, a text; `breaks` is whether a line ends before it."""

    kind: str
    text: str
    breaks: bool

    @property
    def ends_value(self) -> bool:
        if self.kind == "name":
            return self.text not in _KEYWORDS or self.text in _VALUES
        return self.text in _VALUE_ENDS or (self.kind != "sign" and not self.text.endswith("${"))


class _Word(NamedTuple):
    """
    A token in its place: `inside` is the innermost bracket around it, and `part` numbers statements and members of classes.

    `use` is "name" of a variable, "shorthand" where a variable's name is a key as well, and empty for all else.
    """

    token: _Token
    inside: str
    part: int
    use: str


def minified(source: str, exported: Collection[str]) -> str:
    r"""
    A module without comments and the spaces that separate nothing, whose variables have short names, but for those exported.

    Names of properties stay. It reads what the panel's modules are written in, not all of JavaScript.

    >>> minified("const double = (value) => 2 * value;\nexport { double };", ["double"])
    'let double=(a)=>2*a;export{double};'
    """
    words = [*_words([*_tokens(source)])]
    return "".join(_written(words, _short_names(words, exported)))


def _tokens(source: str) -> Iterator[_Token]:
    position, breaks, last = 0, False, _Token("sign", ";", False)
    braces: list[int] = []  # those open within each template's hole
    while position < len(source):
        kind = ""
        if source[position] == "`" or (source[position] == "}" and braces and not braces[-1]):
            found, kind = _TEMPLATE.match(source, position), "template"
        elif source[position] == "/" and not last.ends_value and (found := _REGEX.match(source, position)):
            kind = "text"
        else:
            found = _TOKEN.match(source, position)
        if found is None:
            raise ValueError(f"there is no JavaScript that can be read at {source[position : position + 40]!r}")
        kind, text, position = kind or str(found.lastgroup), found[0], found.end()
        if kind in ("space", "comment"):
            breaks |= "\n" in text
            continue
        if kind == "template":
            braces = braces[: len(braces) - (text[0] == "}")] + [0] * text.endswith("${")
        elif braces and text in ("{", "}"):
            braces[-1] += 1 if text == "{" else -1
        last, breaks = _Token(kind, text, breaks), False
        yield last


def _words(tokens: Sequence[_Token]) -> Iterator[_Word]:
    around: list[str] = []
    part, class_is_next = 0, False
    for index, token in enumerate(tokens):
        before = tokens[index - 1].text if index else ";"
        after = tokens[index + 1].text if index + 1 < len(tokens) else ";"
        class_is_next |= token.text == "class" and before not in (".", "?.") and after != ":"
        closes = token.text in (")", "]", "}") or (token.kind == "template" and token.text[0] == "}")
        if closes:
            around.pop()
        inside = around[-1] if around else ""
        yield _Word(token, inside, part, _use(token, inside, before, after))
        # a method's names are seen nowhere else, as those of a function are not
        if token.text in ("}", ";") and around in ([], ["class"]):
            part += 1
        if token.text == "{":
            is_object = before in _BEFORE_OBJECT or before.endswith("${")
            around.append("class" if class_is_next else "object" if is_object else "block")
            class_is_next = False
        elif token.text in ("(", "[") or (token.kind == "template" and token.text.endswith("${")):
            around.append(token.text[-1])


def _use(token: _Token, inside: str, before: str, after: str) -> str:
    if token.kind != "name" or token.text in _KEYWORDS or before in (".", "?."):
        return ""
    if inside == "object" and before in ("{", ",", "get", "set", "async") and after in (":", "("):
        return ""
    if inside == "object" and before in ("{", ",") and after in (",", "}", "="):
        return "shorthand"
    is_member = inside == "class" and (token.breaks or before in ("{", "}", ";", "get", "set", "static", "async"))
    return "" if is_member else "name"


def _short_names(words: Sequence[_Word], exported: Collection[str]) -> list[dict[str, str]]:
    """The short names in each part: those of the module's own top differ from all others, parts share the shortest."""
    parts: list[list[_Word]] = [[] for _ in range(words[-1].part + 1)]
    for word in words:
        parts[word.part].append(word)
    declared = [{*_declared(part)} for part in parts]
    top = {name for part in parts for name in _declared([word for word in part if not word.inside])} - {*exported}
    used = {word.token.text for word in words if word.use}
    taken = (used - top.union(*declared)) | {*exported} | _KEYWORDS
    free = [name for length in (1, 2) for name in map("".join, product(_LETTERS, repeat=length)) if name not in taken]
    of_top = dict(zip(sorted(top), (name for name in free if len(name) > 1), strict=False))
    others = [name for name in free if name not in of_top.values()]
    found = []
    for part, names in zip(parts, declared, strict=True):
        # in the order in which they appear: alike functions are alike
        own = dict.fromkeys(
            word.token.text for word in part if word.use and word.token.text in names - top - {*exported}
        )
        found.append({**of_top, **dict(zip(own, others, strict=False))})
    return found


def _declared(words: Sequence[_Word]) -> Iterator[str]:
    """The names that are declared among these words: variables, functions, classes, parameters."""
    opened: list[int] = []
    for index, (token, _, _, use) in enumerate(words):
        earlier, before, after = (
            words[at].token.text if 0 <= at < len(words) else ";" for at in (index - 2, index - 1, index + 1)
        )
        is_generator = (earlier, before) == ("function", "*")
        if use and (before in ("const", "let", "function", "class") or is_generator or after == "=>"):
            yield token.text
        if token.text in ("(", "[", "{"):
            opened.append(index)
        elif token.text in (")", "]", "}") and opened:
            start = opened.pop()
            keyword = words[start - 1].token.text if start else ";"
            if keyword in ("const", "let") or (
                token.text == ")" and after in ("{", "=>") and keyword not in _CONDITIONS
            ):
                yield from _bound(words, start, index)


def _bound(words: Sequence[_Word], start: int, end: int) -> Iterator[str]:
    """The names that a pattern between two brackets binds: none of its defaults, nor of its keys."""
    for index in range(start + 1, end):
        before, after = words[index - 1].token.text, words[index + 1].token.text
        if words[index].use and before in "([{,...:" and after in ")]},=":
            yield words[index].token.text


def _written(words: Sequence[_Word], names: Sequence[dict[str, str]]) -> Iterator[str]:
    last = _Token("sign", ";", False)
    for (token, _, part, use), (after, *_) in pairwise([*words, _Word(last, "", 0, "")]):
        if token.text == ";" and after.text == "}" and last.text != ")":
            continue
        # one word for both is what packs shorter; nothing sets a constant again
        name = names[part].get(token.text, token.text) if use else "let" if token.text == "const" else token.text
        text = f"{token.text}:{name}" if use == "shorthand" and name != token.text else name
        if token.breaks and last.ends_value and token.text not in _GO_ON:
            yield "\n"
        elif _is_joined(last.text[-1], text[0]):
            yield " "
        yield text
        last = token


def _is_joined(left: str, right: str) -> bool:
    """Whether two tokens would be read as one without a space."""
    return (left == right and left in "+-") or all(letter.isalnum() or letter in "_$" for letter in left + right)
