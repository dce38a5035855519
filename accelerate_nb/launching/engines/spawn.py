"""Workers that start as fresh Pythons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from accelerate_nb.launching.engines.children import Children
from accelerate_nb.launching.order import Order, as_text


class FreshPython:
    """Places workers by starting one new interpreter each; nothing of this process is in them."""

    def start(self, orders: Sequence[Sequence[Order]]) -> Children:
        """Start one interpreter for each sequence of orders."""
        return Children({_spawn(own): [order.seat.rank for order in own] for own in orders})


def _spawn(orders: Sequence[Order]) -> int:
    told, tell = os.pipe()
    environ = {**orders[0].surroundings.environ, **orders[0].seat.environ()}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with os.fdopen(tell, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate_nb.launching.worker", str(told)],
            stdin=subprocess.DEVNULL,
            pass_fds=[told, *(one for order in orders for one in order.descriptors.all())],
            start_new_session=True,
            env=environ,
        )
        os.close(told)
        file.write(as_text(orders))
    # the process is waited for by its number, and Popen must not do it too when it is collected
    process.returncode = 0
    return process.pid
