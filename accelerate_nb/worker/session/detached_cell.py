"""A notebook's cell as a function of its own, for a run that outlives the notebook."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from accelerate_nb.rank import background_tasks
from accelerate_nb.sources.cells import sources_of
from accelerate_nb.sources.run_source import SourcePart
from accelerate_nb.transport.session_tasks import RunCell
from accelerate_nb.worker.session.task_loop import NAMESPACE, below, is_no_failure


@dataclass(frozen=True)
class DetachedCell:
    """
    Runs a cell on a rank, with `accelerator`, `rank`, `world_size` and `device`.

    `values` are the notebook's variables that the cell names; what its last expression is worth is shown, and not returned.
    """

    cell: RunCell
    values: Mapping[str, Any]
    __name__: str

    def source_parts(self) -> tuple[SourcePart, ...]:
        """The cell's text, which its run's folder keeps."""
        return (SourcePart("function", self.__name__, self.cell.source.lstrip("\n")),)

    def __call__(self) -> None:
        from accelerate_nb.worker.session.shell import new_shell, show

        main = sys.modules["__main__"]
        if not isinstance(main, ModuleType):
            main = sys.modules["__main__"] = ModuleType("__main__")
        shell = new_shell(main)
        shell.compile._filename_map[self.cell.filename] = self.cell.number
        exec(compile(NAMESPACE, "<accelerate_nb>", "exec"), vars(main))
        vars(main).update(self.values)
        bundle, metadata, error = shell.run(self.cell)
        if error is not None and not is_no_failure(error):
            raise error.with_traceback(below(error.__traceback__, sources_of(shell.compile._filename_map)))
        background_tasks.finish()
        if bundle is not None and vars(main)["rank"] == 0:
            show(bundle, metadata)
