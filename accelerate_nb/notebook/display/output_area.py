"""An output of a notebook's cell that can be drawn anew, from any cell and any thread."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple


class Bundle(NamedTuple):
    """What is shown, in several forms of which a page takes the best that it knows: a MIME bundle."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = {}


class Output:
    """
    Something shown in the cell that runs at this moment.

    >>> output = Output(Bundle({"text/plain": "1 of 2"}))
    >>> output.update(Bundle({"text/plain": "2 of 2"}))
    """

    def __init__(self, bundle: Bundle) -> None:
        from IPython.display import display

        self.cell = cell_now()
        self._handle: Any = display(  # type: ignore[no-untyped-call]  # IPython leaves it without types
            dict(bundle.data), metadata=dict(bundle.metadata), raw=True, display_id=True
        )

    def update(self, bundle: Bundle) -> None:
        """Show this instead."""
        self._handle.update(dict(bundle.data), metadata=dict(bundle.metadata), raw=True)


def cell_now() -> str:
    """A name for the cell that runs at this moment, equal as long as it does; empty outside of a kernel."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython is not None else None
    parent = kernel.get_parent() if kernel is not None else {}
    return str((parent or {}).get("header", {}).get("msg_id", ""))
