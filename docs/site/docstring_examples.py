"""Griffe's extension for what a page shows of an object: examples as blocks of code, defaults as a caller sees them."""

from __future__ import annotations

import re
from typing import Any

import griffe

# The first line after a prompt, and what follows it up to an empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", flags=re.MULTILINE)
# A default that the launchers can tell from the same value in a call.
MARKED = re.compile(r"unset\((.*)\)")


class DocstringExamples(griffe.Extension):
    """Docstrings are Markdown, where `>>>` would begin a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Show the value of a marked default."""
        for parameter in func.parameters:
            if marked := MARKED.fullmatch(str(parameter.default)):
                parameter.default = marked[1]
