"""The settings of the picker's form: those that matter first, and the others folded away, with a filter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ipywidgets

from accelerate_nb.config.settings import GROUPS
from accelerate_nb.notebook.picker import html
from accelerate_nb.notebook.picker.fields import SettingField

# The settings that every launch is about: how many processes, on what, in which precision, in steps of how much, for how long.
FIRST = ("num_processes", "cpu", "mixed_precision", "gradient_accumulation_steps", "timeout")


class SettingsSection:
    """
    The first settings, and a button that shows all others by their groups; a filter leaves those that have all its words.

    The filter reads a setting's name, label, help and heading.
    """

    def __init__(self, fields: Mapping[str, SettingField]) -> None:
        self._others = [field for name, field in fields.items() if name not in FIRST]
        first = _grid(fields[name] for name in FIRST)
        self._groups = {
            key: self._group(key) for key in GROUPS if any(field.setting.group == key for field in self._others)
        }
        self.filter = ipywidgets.Text(description="Filter", placeholder="a part of a name or of its help")
        self.filter.observe(lambda _: self._show_matches(), names="value")
        self._count = ipywidgets.HTML()
        self._button = ipywidgets.Button(tooltip="Show the settings that are seldom changed").add_class("acc-more")
        self._button.on_click(lambda _: self.unfold(folded=not self._is_folded))
        row = ipywidgets.Box([self.filter, self._count]).add_class("acc-row")
        self._folded = ipywidgets.VBox([row, *self._groups.values()])
        self.box = ipywidgets.VBox([first, self._button, self._folded]).add_class("acc-group")
        self.unfold(folded=True)

    def unfold(self, *, folded: bool = False) -> None:
        """Show all settings, or fold away those that are not among the first."""
        self._folded.layout.display = "none" if folded else None
        self._button.description = f"▸ All settings ({len(self._others)} more)" if folded else "▾ Fewer settings"

    def show_wrong(self, wrong: Mapping[str, str]) -> None:
        """Show the settings that something is wrong with, also where they were folded or filtered away."""
        hidden = [field for field in self._others if field.setting.name in wrong]
        if hidden and self._is_folded:
            self.unfold()
        if any(field.box.layout.display == "none" for field in hidden):
            self.filter.value = ""

    @property
    def _is_folded(self) -> bool:
        return bool(self._folded.layout.display == "none")

    def _group(self, key: str) -> Any:
        fields = [field for field in self._others if field.setting.group == key]
        heading = ipywidgets.HTML(html.heading(GROUPS[key]))
        in_order = sorted(fields, key=lambda field: field.setting.advanced)
        return ipywidgets.VBox([heading, _grid(in_order)]).add_class("acc-group")

    def _show_matches(self) -> None:
        words = self.filter.value.casefold().split()
        found = {field.setting.name for field in self._others if all(word in _text_of(field) for word in words)}
        for field in self._others:
            _show(field.box, shown=field.setting.name in found)
        for key, box in self._groups.items():
            _show(box, shown=any(field.setting.group == key and field.setting.name in found for field in self._others))
        number = f"{len(found)} of {len(self._others)} settings"
        self._count.value = html.status(number) if words else ""


def _text_of(field: SettingField) -> str:
    setting = field.setting
    return f"{setting.name} {setting.label} {setting.help} {GROUPS[setting.group]}".casefold()


def _show(box: Any, *, shown: bool) -> None:
    box.layout.display = None if shown else "none"


def _grid(fields: Iterable[SettingField]) -> Any:
    return ipywidgets.Box([field.box for field in fields]).add_class("acc-fields")
