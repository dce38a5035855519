"""The picker's configuration file: save, with a check of an existing file, and load."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ipywidgets

from accelerate_nb.config.hf import files
from accelerate_nb.config.hf.files import ConfigDraft
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.notebook.picker import html


class FileSection:
    """
    The part of the form that saves and loads the configuration file.

    `content` gives what is to be saved, `loaded` takes the path of a file whose settings are to be shown.
    """

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
        draft = files.draft(self.path.value, self._content())
        would_lose = draft.replaces and (draft.changed or draft.comments)
        if would_lose and draft != self._agreed and draft.path != self._own_path:
            self._agreed = draft
            self.save.description = "Save over it"
            return f"{draft.path} is there already. {_what_changes(draft)} Press “Save over it” to do so."
        draft.write()
        self.allow(possible=self._possible)
        self._own_path = draft.path
        return f"Saved to {draft.path}. {_how_to_use(draft.path)}"

    def _load(self) -> str:
        path = files.find({}, self.path.value or str(files.default_path(os.environ)))
        assert path is not None, "a file that was named is there, or an error"
        self._loaded(str(path))
        self._own_path = path
        return f"Loaded from {path}."


def _what_changes(draft: ConfigDraft) -> str:
    parts = [f"changes {', '.join(draft.changed)}"] if draft.changed else []
    parts += [f"keeps {', '.join(draft.kept)}"] if draft.kept else []
    parts += ["leaves out its comments"] if draft.comments else []
    return f"Saving {', '.join(parts)}."


def _how_to_use(path: Path) -> str:
    if files.default_path(os.environ) == path:
        return "Every launch takes from it what the call does not set."
    return f"Launch with config_file={str(path)!r}."
