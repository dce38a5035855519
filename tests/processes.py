"""Pythons in processes of their own, and what they wrote; and a process with many open descriptors."""

import fcntl
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# select() takes no descriptor from this number on.
FD_SETSIZE = 1024
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def python(
    *words: str | Path, folder: Path | None = None, limit: float = 150, check: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A Python with these words, in a folder, with more variables than this process has."""
    variables: Mapping[str, Any] = {**os.environ, **environment}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=limit, check=check, input=""
    )


@contextmanager
def many_descriptors() -> Iterator[Callable[[socket.socket], socket.socket]]:
    """Give sockets a descriptor that is too high for select(), as a process has it that holds many files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] <= FD_SETSIZE + 8:
        pytest.skip("this machine allows no such descriptor")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], FD_SETSIZE + 9), limits[1]))

    def moved(sock: socket.socket) -> socket.socket:
        with sock:
            return socket.socket(fileno=fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, FD_SETSIZE))

    try:
        yield moved
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
