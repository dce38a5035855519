"""The parts of the picker's form: a field for each setting, the groups of them, the file, the cell to copy and the self-test."""

import contextvars
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from accelerate_nb.config import hf_files
from accelerate_nb.config.hf_files import ConfigDraft
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.config.settings import GROUPS, Setting
from accelerate_nb.config.value_types import Boolean, NamedValues, OneOf
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.events.event_types import CheckResult
from accelerate_nb.launching.self_test import SelfTest
from accelerate_nb.notebook.picker import html


class InsertCellButton(anywidget.AnyWidget):
    """The button that puts `code` into the notebook as a cell; shown in JupyterLab and Notebook alone, whose pages may do that."""

    _esm = resources.files(__package__).joinpath("insert_cell.js").read_text(encoding="utf-8")
    code: Any = traitlets.Unicode("").tag(sync=True)


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

    def show(self, value: Any) -> None:
        """Put a setting's value into the control."""
        self.control.value = _as_typed(self.setting, value)

    @property
    def is_default(self) -> bool:
        """Whether the control shows the setting's default."""
        return bool(self.control.value == _as_typed(self.setting, self.setting.default))

    def mark(self, origin: str) -> None:
        """Show the source of the value."""
        self._origin.value = f'<span class="acc-origin">{escape(origin)}</span>' if origin else ""

    def remark(self, wrong: str | None, advice: str | None) -> None:
        """Show an error of the value, or advice."""
        self._remark.value = html.remark(wrong or advice or "", grave=wrong is not None)
        (self.box.add_class if wrong else self.box.remove_class)("acc-is-wrong")


def _control(setting: Setting) -> Any:
    shown = {
        "description": f"{escape(setting.label)} <code>{escape(setting.name)}</code>",
        "description_allow_html": True,
        "tooltip": setting.help,
    }
    if "tooltip" not in ipywidgets.Text.class_trait_names():  # before ipywidgets 8, where descriptions are HTML
        shown = {"description": shown["description"], "description_tooltip": setting.help}
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
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _default(setting: Setting) -> str:
    if isinstance(setting.value_type, (Boolean, OneOf)) or setting.default in {None, ""}:
        return ""
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


# The settings that every launch is about: how many processes, on what, in which precision, in steps of how much, for how long.
FIRST = ("num_processes", "cpu", "mixed_precision", "gradient_accumulation_steps", "timeout")


class SettingsSection:
    """The first settings, and a button that shows all others by their groups; a filter leaves those that have all its words."""

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
        texts = {
            item.name: f"{item.name} {item.label} {item.help} {GROUPS[item.group]}".casefold()
            for item in (field.setting for field in self._others)
        }
        found = {name for name, text in texts.items() if all(word in text for word in words)}
        for field in self._others:
            _show(field.box, shown=field.setting.name in found)
        for key, box in self._groups.items():
            _show(box, shown=any(field.setting.group == key and field.setting.name in found for field in self._others))
        number = f"{len(found)} of {len(self._others)} settings"
        self._count.value = html.status(number) if words else ""


def _show(box: Any, *, shown: bool) -> None:
    box.layout.display = None if shown else "none"


def _grid(fields: Iterable[SettingField]) -> Any:
    return ipywidgets.Box([field.box for field in fields]).add_class("acc-fields")


class FileSection:
    """The part of the form that saves and loads the configuration file: `content` is saved, `loaded` shows a file's settings."""

    def __init__(self, content: Callable[[], Mapping[str, Any]], loaded: Callable[[str], None], path: str) -> None:
        self._content, self._loaded = content, loaded
        self._agreed: ConfigDraft | None = None
        self._own_path: Path | None = None
        self._possible = True
        self.path = ipywidgets.Text(path, description="file", tooltip="Where the configuration is saved")
        self.save = ipywidgets.Button(description="Save")
        self.load = ipywidgets.Button(description="Load")
        self._status = ipywidgets.HTML()
        self.save.on_click(lambda _: self._reporting(self._save))
        self.load.on_click(lambda _: self._reporting(self._load))
        self.path.observe(lambda _: self.allow(possible=self._possible), names="value")
        field = ipywidgets.Box([self.path]).add_class("acc-field").add_class("acc-path")
        row = ipywidgets.Box([field, self.save, self.load]).add_class("acc-row")
        heading = ipywidgets.HTML(html.heading("Keep it"))
        self.box = ipywidgets.VBox([heading, row, self._status]).add_class("acc-group")

    @property
    def status(self) -> str:
        """The result of the last press, as HTML."""
        return str(self._status.value)

    def allow(self, *, possible: bool) -> None:
        """Set whether there is something to save; a pending question about another content is dropped."""
        self._possible = possible
        self._agreed = None
        self.save.description = "Save"
        self.save.disabled = not possible

    def _reporting(self, act: Callable[[], str]) -> None:
        try:
            self._status.value = html.status(act())
        except AccelerateNbError as error:
            self._status.value = html.remark(str(error), grave=True)

    def _save(self) -> str:
        draft = hf_files.draft(self.path.value, self._content())
        would_lose = draft.replaces and (draft.changed or draft.comments)
        if would_lose and draft != self._agreed and draft.path != self._own_path:
            self._agreed = draft
            self.save.description = "Save over it"
            parts = [f"changes {', '.join(draft.changed)}"] if draft.changed else []
            parts += [f"keeps {', '.join(draft.kept)}"] if draft.kept else []
            parts += ["leaves out its comments"] if draft.comments else []
            return f"{draft.path} is there already. Saving {', '.join(parts)}. Press “Save over it” to do so."
        draft.write()
        self.allow(possible=self._possible)
        self._own_path = draft.path
        if hf_files.default_path(os.environ) == draft.path:
            return f"Saved to {draft.path}. Every launch takes from it what the call does not set."
        return f"Saved to {draft.path}. Launch with config_file={str(draft.path)!r}."

    def _load(self) -> str:
        path = hf_files.find({}, self.path.value or str(hf_files.default_path(os.environ)))
        assert path is not None, "a file that was named is there, or an error"
        self._loaded(str(path))
        self._own_path = path
        return f"Loaded from {path}."


class TestSection:
    """The part of the form that tests the settings, in the background of the notebook."""

    __test__ = False  # its name is its own, and no test's

    def __init__(self, config: Callable[[], RunConfig]) -> None:
        self._config = config
        self._thread: threading.Thread | None = None
        self._check: SelfTest | None = None
        self.begin = ipywidgets.Button(description="Test these settings", tooltip="Try them with real workers")
        self.end = ipywidgets.Button(description="Stop the test", disabled=True)
        self._status, self._list = ipywidgets.HTML(), ipywidgets.HTML()
        self.begin.on_click(lambda _: self.start())
        self.end.on_click(lambda _: self.stop())
        row = ipywidgets.Box([self.begin, self.end]).add_class("acc-row")
        heading = ipywidgets.HTML(html.heading("Does it work?"))
        self.box = ipywidgets.VBox([heading, row, self._status, self._list]).add_class("acc-group")
        self._possible = True

    @property
    def checks(self) -> list[CheckResult]:
        """The results of the latest test so far."""
        return [] if self._check is None else self._check.checks

    def allow(self, *, possible: bool) -> None:
        """Set whether there is something to test."""
        self._possible = possible
        self.begin.disabled = not possible or self._is_running()

    def start(self) -> None:
        """Begin a test in the background, unless one runs."""
        if self._is_running():
            return
        check = SelfTest(self._config(), lambda _: self._draw(check.checks))
        self._check = check
        self.begin.disabled, self.end.disabled = True, False
        self._status.value, self._list.value = html.status("Testing with real workers…"), ""

        def work() -> None:
            try:
                self._draw(found := check.run())
                states = [item.state for item in found]
                text = f"All {len(found)} checks passed."
                if "failed" in states:
                    text = f"{states.count('failed')} of {len(found)} checks failed."
                elif "left out" in states:
                    text = f"Stopped after {states.count('passed')} of {len(found)} checks."
                self._status.value = html.status(text)
            finally:
                self._thread = None
                self.begin.disabled, self.end.disabled = not self._possible, True

        # ipykernel knows by the context which cell a thread belongs to
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(work,), name="accelerate_nb self-test", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the running test; unfinished checks are left out."""
        if self._check is not None:
            self._check.stop()

    def wait(self, timeout: float | None = None) -> list[CheckResult]:
        """Wait until the test is over, and give what it found."""
        if (thread := self._thread) is not None:
            thread.join(timeout)
        return self.checks

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _draw(self, checks: Sequence[CheckResult]) -> None:
        self._list.value = html.checks(checks)
