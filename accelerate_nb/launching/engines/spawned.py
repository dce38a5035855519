"""Workers that start as fresh Pythons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from accelerate_nb.launching.engines.children import Children
from accelerate_nb.launching.order import Order


class FreshPython:
    """Places workers by starting one new interpreter each; nothing of this process is in them."""

    def start(self, orders: Sequence[Order]) -> Children:
        """Start one interpreter an order."""
        return Children({order.seat.rank: _spawn(order) for order in orders})


def _spawn(order: Order) -> int:
    told, tell = os.pipe()
    environ = {**order.surroundings.environ, **order.seat.environ()}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with os.fdopen(tell, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate_nb.launching.worker", str(told)],
            stdin=subprocess.DEVNULL,
            pass_fds=[told, *order.descriptors.all()],
            start_new_session=True,
            env=environ,
        )
        os.close(told)
        file.write(order.to_json())
    # the process is waited for by its number, and Popen must not do it too when it is collected
    process.returncode = 0
    return process.pid
