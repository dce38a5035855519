"""One setting in the picker's form: its control, its help, and remarks on its value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import ipywidgets

from accelerate_nb.config.settings import Setting
from accelerate_nb.config.value_types import Boolean, NamedValues, OneOf
from accelerate_nb.notebook.picker import html

_LEFT_OPEN = "left open"


class SettingField:
    """The control of one setting; what is typed is read and shown by the form."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.control = _control(setting)
        self._origin = ipywidgets.HTML()
        self._remark = ipywidgets.HTML()
        about = ipywidgets.HTML(html.help_line(setting.help, _default(setting), setting.unsupported))
        self.box = ipywidgets.VBox([self.control, self._remark, self._origin, about]).add_class("acc-field")

    @property
    def typed(self) -> Any:
        """The value of the control."""
        return self.control.value

    def show(self, value: Any) -> None:
        """Put a setting's value into the control."""
        self.control.value = _as_typed(self.setting, value)

    @property
    def is_default(self) -> bool:
        """Whether the control shows the setting's default."""
        return bool(self.typed == _as_typed(self.setting, self.setting.default))

    def mark(self, origin: str) -> None:
        """Show the source of the value."""
        self._origin.value = html.origin_mark(origin)

    def remark(self, wrong: str | None, advice: str | None) -> None:
        """Show an error of the value, or advice."""
        self._remark.value = html.remark(wrong or advice or "", grave=wrong is not None)
        (self.box.add_class if wrong else self.box.remove_class)("acc-is-wrong")

    def on_change(self, changed: Callable[[Setting], None]) -> None:
        """Call `changed` after each change of the control's value."""
        self.control.observe(lambda _: changed(self.setting), names="value")


def _control(setting: Setting) -> Any:
    shown = {
        "description": html.setting_label(setting.label, setting.name),
        "description_allow_html": True,
        "tooltip": setting.help,
    }
    if isinstance(setting.value_type, Boolean) and not setting.nullable:
        return ipywidgets.Checkbox(value=setting.default, indent=False, **shown)
    if isinstance(setting.value_type, (Boolean, OneOf)):
        options = [(str(choice), choice) for choice in setting.choices or (True, False)]
        # a control whose value is None shows nothing at all
        open_too = [(_LEFT_OPEN, "")] if setting.nullable else []
        value = _as_typed(setting, setting.default)
        return ipywidgets.Dropdown(options=[*open_too, *options], value=value, **shown)
    return ipywidgets.Text(placeholder=_default(setting) or _LEFT_OPEN, **shown)


def _as_typed(setting: Setting, value: Any) -> Any:
    """A value as the setting's control shows it; a default in a control for texts is left out."""
    if isinstance(setting.value_type, (Boolean, OneOf)):
        return "" if value is None else value
    if value is None or value == setting.default:
        return ""
    if isinstance(setting.value_type, NamedValues):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(setting: Setting) -> str:
    if isinstance(setting.value_type, (Boolean, OneOf)) or setting.default in {None, ""}:
        return ""
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)
