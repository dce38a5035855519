"""One setting in the picker's form: its control, its help, what is said of its value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ipywidgets

from accelerate_nb.config.fields import GROUPS, Setting
from accelerate_nb.config.kinds import OneOf, Table, YesNo
from accelerate_nb.notebook.picking import page

_LEFT_OPEN = "left open"


class Field:
    """The control of one setting; what is typed is read and shown by the form."""

    def __init__(self, one: Setting) -> None:
        self.setting = one
        self.control = _control(one)
        self._origin = ipywidgets.HTML()
        self._remark = ipywidgets.HTML()
        about = ipywidgets.HTML(page.help_line(one.help, _default(one), one.later))
        self.box = ipywidgets.VBox([self.control, self._remark, self._origin, about])
        self.box.add_class("acc-field")

    @property
    def typed(self) -> Any:
        """What stands in the control."""
        return self.control.value

    def show(self, value: Any) -> None:
        """Put a setting's value into the control."""
        self.control.value = _as_typed(self.setting, value)

    def mark(self, origin: str) -> None:
        """Say where the value comes from; nothing for a default."""
        self._origin.value = page.origin_mark(origin)

    def remark(self, wrong: str | None, advice: str | None) -> None:
        """Say what is wrong with the value, or what would be better."""
        self._remark.value = page.remark(wrong or advice or "", grave=wrong is not None)
        (self.box.add_class if wrong else self.box.remove_class)("acc-is-wrong")

    def on_change(self, changed: Callable[[Setting], None]) -> None:
        """Call `changed` after each change of what stands in the control."""
        self.control.observe(lambda _: changed(self.setting), names="value")


class Group:
    """The settings under one heading; advanced ones are folded."""

    def __init__(self, key: str, fields: Iterable[Field], note: str = "") -> None:
        own = list(fields)
        self._advanced = [field for field in own if field.setting.advanced]
        self._folded = _grid(self._advanced)
        self._button = ipywidgets.Button(tooltip=f"Settings of {GROUPS[key]} that are seldom changed")
        self._button.add_class("acc-more")
        self._button.on_click(lambda _: self.unfold(folded=not self._is_folded()))
        plain = [field for field in own if not field.setting.advanced]
        self._more = "more " if plain else ""
        folded = [self._button, self._folded] if self._advanced else []
        head = ipywidgets.HTML(page.heading(GROUPS[key], note))
        self.box = ipywidgets.VBox([head, *([_grid(plain)] if plain else []), *folded])
        self.box.add_class("acc-group")
        self.unfold(folded=True)

    def unfold(self, *, folded: bool = False) -> None:
        """Show the advanced settings, or fold them away again."""
        self._folded.layout.display = "none" if folded else None
        number = len(self._advanced)
        self._button.description = (
            f"▸ {number} {self._more}setting{'s' if number > 1 else ''}" if folded else "▾ Fewer settings"
        )

    def unfold_wrong(self, wrong: Mapping[str, str]) -> None:
        """Show the advanced settings if something is wrong with one of them."""
        if self._is_folded() and any(field.setting.name in wrong for field in self._advanced):
            self.unfold()

    def _is_folded(self) -> bool:
        return bool(self._folded.layout.display == "none")


def _grid(fields: Iterable[Field]) -> Any:
    grid = ipywidgets.Box([field.box for field in fields])
    grid.add_class("acc-fields")
    return grid


def _control(one: Setting) -> Any:
    if isinstance(one.kind, YesNo) and not one.nullable:
        return ipywidgets.Checkbox(value=one.default, description=one.name, indent=False, tooltip=one.help)
    if isinstance(one.kind, (YesNo, OneOf)):
        options = [(str(choice), choice) for choice in one.choices or (True, False)]
        # a control whose value is None shows nothing at all
        open_too = [(_LEFT_OPEN, "")] if one.nullable else []
        value = _as_typed(one, one.default)
        return ipywidgets.Dropdown(options=[*open_too, *options], value=value, description=one.name, tooltip=one.help)
    return ipywidgets.Text(description=one.name, placeholder=_default(one) or _LEFT_OPEN, tooltip=one.help)


def _as_typed(one: Setting, value: Any) -> Any:
    """A value as it stands in the setting's control; a default in a control for texts is left out."""
    if isinstance(one.kind, (YesNo, OneOf)):
        return "" if value is None else value
    if value is None or value == one.default:
        return ""
    if isinstance(one.kind, Table):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(one: Setting) -> str:
    if isinstance(one.kind, (YesNo, OneOf)) or one.default in {None, ""}:
        return ""
    return f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
