"""The facts of a run that do not change while it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.events.run_reader import SavedRun, default_name, differing_arguments, kept_runs
from accelerate_nb.events.run_state import RunInfo
from accelerate_nb.events.terminal_lines import plain, plain_name


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that do not change while a run is shown; `host` and what follows are for a page that shows it live."""

    name: str
    why: str
    folder: str
    started: float
    size: int
    host: str = "jupyter"
    background: bool = False
    can_act: bool = True
    tags: tuple[str, ...] = ()
    # the call that shows a detached run again
    attach: str = ""

    @classmethod
    def of(cls, run: RunInfo, host: str, *, background: bool, can_act: bool) -> RunFacts:
        """The facts of a run."""
        return cls(
            name=plain_name(_name_among_runs(run)),
            why=plain(run.why),
            folder=shown_path(run.folder),
            started=run.started,
            size=len(run.view.ranks),
            host=host,
            background=background,
            can_act=can_act,
            tags=tuple(getattr(run, "tags", ())),
            attach=f'accelerate_nb.attach("{shown_path(run.folder)}")' if getattr(run, "is_detached", False) else "",
        )

    @classmethod
    def of_saved(cls, run: SavedRun) -> RunFacts:
        """The facts of a run that nobody can act on: from its folder."""
        return cls(
            run.name, run.why, shown_path(run.folder), run.started, run.ranks, host="", can_act=False, tags=run.tags
        )

    def message(self) -> dict[str, Any]:
        """The facts as a page reads them."""
        return {name: getattr(self, name) for name in self.__slots__}


def _name_among_runs(run: RunInfo) -> str:
    """The name of a run; without one of its own, its function's with the arguments in which earlier runs of it differ."""
    arguments = getattr(run, "arguments", None)
    if not arguments or run.name != getattr(run, "function", ""):
        return run.name
    others = (saved.arguments for saved in kept_runs(run.folder.parent) if saved.function == run.name)
    return default_name(run.name, arguments, differing_arguments([arguments, *others]))
