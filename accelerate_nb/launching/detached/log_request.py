"""The request of another process for all that a rank of another machine wrote, which the run host fetches from there."""

from __future__ import annotations

from pathlib import Path

from accelerate_nb.events.run_folder import status_of, whole_log
from accelerate_nb.launching.detached.control_client import ControlClient
from accelerate_nb.launching.detached.control_socket import check_owner
from accelerate_nb.transport.messages import (
    FetchRankLog,
    RankLogFile,
)

# Longer than the run host takes for it.
_TIMEOUT = 75.0


def requested_log(folder: Path, rank: int) -> Path | None:
    """
    The file of all that a rank wrote so far, where parts are left out of its log in the run's folder.

    `None` where nobody has it: its run was launched by a notebook that conducts it, or is over.
    """
    whole = whole_log(folder, rank)
    if whole.exists():
        return whole
    control = (status_of(folder) or {}).get("control")
    if control is None:
        return None
    check_owner(folder)
    client = ControlClient(Path(control))
    try:
        reply = client.request(FetchRankLog(rank), _TIMEOUT)
    except OSError:
        return None
    finally:
        client.close()
    return Path(reply.path) if isinstance(reply, RankLogFile) else None
