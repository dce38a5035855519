"""A terminal's colours as HTML."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, replace

from accelerate_nb.events.terminal_lines import SEQUENCE, legible

# Mid-tones, legible on white and on black; the bright ones are the same.
_NAMED = ("#767676", "#d13438", "#2e8b3d", "#a97000", "#3178c6", "#a54cb5", "#17858f", "#767676")


@dataclass(frozen=True, slots=True)
class _TextStyle:
    colour: str = ""
    bold: bool = False
    slanted: bool = False
    underlined: bool = False

    def dressed(self, text: str) -> str:
        if not text or self == _TextStyle():
            return text
        style = "".join(
            (
                f"color:{self.colour};" if self.colour else "",
                "font-weight:bold;" if self.bold else "",
                "font-style:italic;" if self.slanted else "",
                "text-decoration:underline;" if self.underlined else "",
            )
        )
        return f'<span style="{style}">{text}</span>'


def as_html(text: str) -> str:
    """A line of text as HTML, its colours as spans; nothing that a rank wrote becomes markup."""
    parts: list[str] = []
    style, end = _TextStyle(), 0
    for found in SEQUENCE.finditer(text):
        parts.append(style.dressed(_escaped(text[end : found.start()])))
        end = found.end()
        if found[1] is not None:
            style = _after(style, found[1])
    parts.append(style.dressed(_escaped(text[end:])))
    return "".join(parts)


def _escaped(text: str) -> str:
    return html.escape(legible(text))


def _after(style: _TextStyle, codes: str) -> _TextStyle:
    """The style of text after a colour sequence: `31` is red, `1` bold, `38;5;n` one of 256, `38;2;r;g;b` any."""
    numbers = [min(int(code or 0), 255) for code in re.split("[;:]", codes[:40])]
    while numbers:
        code = numbers.pop(0)
        if code == 0:
            style = _TextStyle()
        elif code in {1, 22}:
            style = replace(style, bold=code == 1)
        elif code in {3, 23}:
            style = replace(style, slanted=code == 3)
        elif code in {4, 24}:
            style = replace(style, underlined=code == 4)
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style = replace(style, colour=_NAMED[code % 10])
        elif code == 38:
            style = replace(style, colour=_chosen(numbers))
        elif code == 48:
            _chosen(numbers)
        elif code == 39:
            style = replace(style, colour="")
    return style


def _chosen(numbers: list[int]) -> str:
    """The colour that the next numbers name, which are taken away."""
    kind = numbers.pop(0) if numbers else 0
    if kind == 5 and numbers:
        return _of_256(numbers.pop(0))
    if kind == 2 and len(numbers) >= 3:
        red, green, blue = (numbers.pop(0) for _ in range(3))
        return f"#{red:02x}{green:02x}{blue:02x}"
    return ""


def _of_256(number: int) -> str:
    if number < 16:
        return _NAMED[number % 8]
    if number >= 232:
        grey = 8 + 10 * (number - 232)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    levels = (0, 95, 135, 175, 215, 255)
    index = number - 16
    return "#" + "".join(f"{levels[index // step % 6]:02x}" for step in (36, 6, 1))
