"""An output of a notebook's cell that can be updated from any cell and any thread."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from accelerate_nb.sources.cells import ipython_shell


class MimeBundle(NamedTuple):
    """A MIME bundle: a display in several formats, of which a page takes the best that it knows."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = {}


class OutputArea(Protocol):
    """An output of a cell, whose name is `cell`."""

    cell: str

    def update(self, bundle: MimeBundle) -> None:
        """Show this instead."""


class CellOutputArea:
    """Something shown in the cell that runs at this moment."""

    def __init__(self, bundle: MimeBundle) -> None:
        from IPython.display import display

        self.cell = cell_now()
        self._handle: Any = display(  # type: ignore[no-untyped-call]  # IPython leaves it without types
            dict(bundle.data), metadata=dict(bundle.metadata), raw=True, display_id=True
        )

    def update(self, bundle: MimeBundle) -> None:
        """Show this instead."""
        self._handle.update(dict(bundle.data), metadata=dict(bundle.metadata), raw=True)


def cell_now() -> str:
    """A name for the cell that runs at this moment, equal as long as it does; empty outside of a kernel."""
    return str(_request().get("header", {}).get("msg_id", ""))


def cell_id() -> str:
    """The id in the notebook's file of the cell that runs at this moment; empty where a page does not send it."""
    return str(_request().get("metadata", {}).get("cellId", ""))


def _request() -> dict[str, Any]:
    """The request of the running cell."""
    kernel = getattr(ipython_shell(), "kernel", None)
    return (kernel.get_parent() if kernel is not None else None) or {}
