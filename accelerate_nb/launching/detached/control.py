"""The control of a detached run: the socket of its run host, what is served over it, and the conductor that reaches it from elsewhere."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from accelerate_nb.errors import AccelerateNbError, LaunchError, StateError
from accelerate_nb.events.event_types import Event, LogLine
from accelerate_nb.events.run_folder import shown_path, status_of
from accelerate_nb.events.run_reader import RunFollower, SavedRun, kept_run
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import plain_name
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.detached.saved_outcome import read_error, saved_result
from accelerate_nb.launching.nodes.node_pool import step_command
from accelerate_nb.launching.run import LaunchFacts, RunControl
from accelerate_nb.launching.step_requests import checked_ranks
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.rank.step_hold import checked_change
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Channel, blocking_pair

_NAME = "control.sock"
# The size of `sockaddr_un.sun_path` is 108 bytes on Linux and 104 on macOS.
_LONGEST_PATH = 100
# A client that takes nothing for so many seconds is given up.
_CLIENT_TIMEOUT = 30.0
# Requests are short; a reply may hold the stacks of many ranks.
_SIZE_LIMIT = 16 << 20
_REPLY_TIMEOUT = 5.0
# How long a command may take until what it passes on arrives, in seconds.
_TUNNEL_TIMEOUT = 30.0
_CONNECT_TIMEOUT = 10.0
_AT_ONCE = 1 << 16
# How often the folder is read for what is new, and the run host is asked for what is not in it.
_BETWEEN_READS = 0.1
_BETWEEN_REQUESTS = 0.5
# How often the folder is asked whether the run is over, where its host does not reply.
_BETWEEN_CHECKS = 1.0
_STACKS_TIMEOUT = 30.0


def _bound(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # the file has its mode from the first moment
    before = os.umask(0o177)
    try:
        with _short(path) as address:
            sock.bind(address)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


def connect(path: Path, timeout: float) -> socket.socket:
    """A connection to the run host that listens there; raises `OSError` where none does, or it is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        with _short(path) as address:
            sock.connect(address)
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket) -> None:
    """Raise `PermissionError` where the process at the other end of a connection is another user's."""
    if sys.platform == "linux":
        credentials = struct.Struct("3i")
        _, user, _ = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    else:
        # `getpeereid` of macOS and the BSDs, which Python does not offer; a `struct xucred` holds it as well: version, user, ...
        local_peercred, size = 0x001, 76
        _, user = struct.unpack_from("2I", sock.getsockopt(0, local_peercred, size))
    if user != os.getuid():
        raise PermissionError(f"The process at the other end is of user {user}, and this one is of user {os.getuid()}.")


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address of a socket's file that is short enough, while the block runs."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    if sys.platform != "linux":
        raise OSError(f"{path} is too long for the address of a socket")
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def live_events(view: RunState) -> Iterator[Event]:
    """The events that make up this part of a state."""
    if view.host is not None:
        yield view.host
    yield from view.node_loads.values()
    for glance in view.glances():
        yield from glance.devices.values()
        yield from (bar for bar in glance.progress.values() if not bar.closed)
        yield from glance.open_lines


def apply_live(view: RunState, events: Sequence[Event]) -> None:
    """Bring another view of the same run to this state."""
    for event in events:
        if not isinstance(event, LogLine):
            view.apply(event)
    view.replace_open_lines([event for event in events if isinstance(event, LogLine)])


class ControlServer:
    """Answers clients, each in a thread of its own, at a socket that only its user can open, in the run's folder if it can be."""

    def __init__(self, folder: Path) -> None:
        self._own_folder: Path | None = None
        try:
            self.path = folder / _NAME
            self.sock = _bound(self.path)
        except OSError:
            # shared and synchronised folders may hold no sockets
            self._own_folder = Path(tempfile.mkdtemp(prefix="accelerate_nb_"))
            self.path = self._own_folder / _NAME
            self.sock = _bound(self.path)
        self.sock.listen(64)

    @contextmanager
    def serve(self, run: RunControl) -> Iterator[None]:
        """A block in which clients are answered; the socket is closed and removed after it."""

        def accept() -> None:
            while True:
                try:
                    client, _ = self.sock.accept()
                except OSError:
                    return
                threading.Thread(target=_serve, args=(client, run), name="accelerate_nb client", daemon=True).start()

        threading.Thread(target=accept, name="accelerate_nb control", daemon=True).start()
        try:
            yield
        finally:
            # wakes the thread that accepts, which a close alone does not
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            self.close()

    def close(self) -> None:
        self.sock.close()
        with suppress(OSError):
            self.path.unlink()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def _serve(client: socket.socket, run: RunControl) -> None:
    with closing(Channel(client, _SIZE_LIMIT)) as channel, suppress(OSError):
        check_peer(client)
        while (received := channel.receive()) is not None:
            reply = _reply(received.message, run)
            if reply is None:
                channel.refuse(received)
                continue
            client.settimeout(_CLIENT_TIMEOUT)
            channel.send(reply)
            client.settimeout(None)


def _reply(message: messages.Message, run: RunControl) -> messages.Message | None:
    match message:
        case messages.RequestStop(how):
            run.request_stop(how)
        case messages.ChangeKnob(name, value):
            # the attached process has checked it; a run that has ended meanwhile changes nothing
            with suppress(AccelerateNbError):
                run.set_knob(name, value)
        case messages.RequestProfile(steps, ranks):
            with suppress(AccelerateNbError):
                run.profile(steps, ranks)
        case messages.QueryStacks():
            return messages.StacksReply(run.stacks())
        case messages.QueryLiveState():
            pass
        case _:
            return None
    return messages.LiveState(run.over.is_set(), tuple(live_events(run.view)))


class ControlClient:
    """Requests to a run host from any thread, through the command `tunnel` where it is on another machine."""

    def __init__(self, path: Path, tunnel: Sequence[str] = ()) -> None:
        self._path, self._tunnel = path, tunnel
        self._sock: socket.socket | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def request(self, message: messages.Message, timeout: float = _REPLY_TIMEOUT) -> messages.Message:
        """The reply to a message; raises `OSError` where no run host replies in time."""
        with self._lock:
            try:
                if self._sock is None or self._channel is None:
                    if self._tunnel:
                        self._sock, far = blocking_pair()
                        with far:
                            end = far.fileno()
                            # it ends with the connection
                            subprocess.Popen(
                                self._tunnel, stdin=end, stdout=end, stderr=subprocess.DEVNULL, start_new_session=True
                            )
                        timeout += _TUNNEL_TIMEOUT
                    else:
                        self._sock = connect(self._path, _REPLY_TIMEOUT)
                    self._channel = Channel(self._sock, passes_descriptors=not self._tunnel)
                self._sock.settimeout(timeout)
                return self._channel.request(message, messages.Message, timeout)
            except BaseException:
                # the reply, which may still come, is not that of the next request
                self.close()
                raise

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._sock = self._channel = None


class RemoteConductor:
    """The conductor of a run in its run host, as a process sees it that attached to the run."""

    # the run host keeps what there is to keep
    trouble = None

    def __init__(self, saved: SavedRun) -> None:
        if (owner := saved.folder.stat().st_uid) != os.getuid():
            raise LaunchError(
                f"{saved.folder} was named, which is a folder of user {owner}, and this process is of user {os.getuid()}. Results are "
                "unpickled, which may run any code: attach as the user who launched the run."
            )
        status = status_of(saved.folder) or {}
        self._follower = RunFollower(saved)
        self.view = self._follower.view
        self.facts = LaunchFacts(
            name=plain_name(saved.name),
            why=saved.why,
            folder=saved.folder,
            started=saved.started,
            results="all" if status.get("results") == "all" else "main",
            stop_grace_period=float(status.get("stop_grace_period") or 0.0),
            tags=saved.tags,
            function=saved.function,
            arguments=saved.arguments,
            is_detached=True,
            outlives_wait=True,
        )
        self.over = threading.Event()
        self.main_rank = 0
        self._rank_results: tuple[RankResult, ...] = ()
        self._error: BaseException | None = None
        self._client: ControlClient | None = None
        if (control := status.get("control")) is not None:
            job, node = status.get("slurm_job"), status.get("slurm_node")
            is_here = status.get("host") == socket.gethostname() or not (job and node) or shutil.which("srun") is None
            command = [sys.executable, "-m", __spec__.name, str(control)]
            # a job's GPUs may be more than its node has
            tunnel = () if is_here else step_command(str(job), str(node), command, "--gres=none")
            self._client = ControlClient(Path(control), tunnel)
        self._is_hosted, self._is_lost, self._end_text = saved.is_detached, saved.is_lost, saved.error
        self._thread: threading.Thread | None = None
        # whether the run host has replied that the run goes on
        self._is_replying = False
        self._follower.update()
        if saved.is_over:
            self._end(saved)

    @property
    def error(self) -> BaseException | None:
        self._read_outcome()
        return self._error

    @property
    def rank_results(self) -> tuple[RankResult, ...]:
        """The results of all ranks, as far as they can be unpickled here; empty while they run."""
        self._read_outcome()
        return self._rank_results

    @property
    def is_going_on(self) -> bool:
        return not self.over.is_set()

    def log_file(self, rank: int) -> Path:
        """The file that holds what a rank wrote, as far as the run host has written it."""
        return self.facts.folder / f"rank_{rank}.log"

    def stacks(self) -> str:
        if self.over.is_set():
            return ""
        reply = self._request(messages.QueryStacks(), _STACKS_TIMEOUT)
        return reply.text if isinstance(reply, messages.StacksReply) else ""

    def start(self) -> None:
        if not self.over.is_set() and self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="accelerate_nb attach", daemon=True)
            self._thread.start()

    def request_stop(self, how: Stop) -> None:
        if not self.over.is_set():
            self._request(messages.RequestStop(how))

    def set_knob(self, name: str, value: float) -> None:
        if self.over.is_set():
            raise StateError(f"Knob {name!r} was to be changed, and the run is over. Knobs change while it runs.")
        self._request(messages.ChangeKnob(name, checked_change(self.view.knobs(), name, value)))

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        self._request(messages.RequestProfile(steps, checked_ranks(self.view, steps, ranks)))

    def _request(self, message: messages.Message, timeout: float = 5.0) -> messages.Message:
        if self._client is None:
            raise LaunchError(f"{self.facts.name} runs in the process that launched it, and can be stopped only there.")
        try:
            return self._client.request(message, timeout)
        except OSError as error:
            saved = kept_run(self.facts.folder)
            if saved is not None and saved.is_over:
                # since a moment ago
                return messages.LiveState(done=True, events=())
            raise LaunchError(
                f"The process that conducts {self.facts.name} did not reply: {error}. `accelerate-nb runs` shows what is known of it; "
                f"its folder is {shown_path(self.facts.folder)}."
            ) from None

    def _follow(self) -> None:
        next_request = next_check = 0.0
        saved: SavedRun | None = None
        while True:
            is_over = False
            now = time.monotonic()
            if now >= next_request:
                next_request = now + _BETWEEN_REQUESTS
                is_over = self._take_live_state()
            if is_over or now >= next_check:
                next_check = now + _BETWEEN_CHECKS
                saved = kept_run(self.facts.folder)
                # a run host that replies is there, whatever became of the folder
                is_over = not self._is_replying and (saved is None or saved.is_over)
            # first the state, then the lines: what was written before the end is not missed
            self._follower.update()
            if is_over:
                break
            time.sleep(_BETWEEN_READS)
        if saved is None:
            size, facts, text = len(self.view.ranks), self.facts, "its folder was removed while it ran"
            saved = SavedRun(facts.folder, facts.name, facts.why, "failed", facts.started, None, size, text)
        self._end(saved)

    def _take_live_state(self) -> bool:
        """Take what the folder does not keep; whether the run host reports the end."""
        if self._client is None:
            return False
        try:
            reply = self._client.request(messages.QueryLiveState())
        except OSError:
            self._is_replying = False
            return True
        self._is_replying = isinstance(reply, messages.LiveState) and not reply.done
        if not isinstance(reply, messages.LiveState):
            return False
        # an event that only another version of this package knows
        with suppress(ValueError, TypeError):
            apply_live(self.view, reply.events)
        return reply.done

    def _end(self, saved: SavedRun) -> None:
        self.view.replace_open_lines(())
        self._follower.finish(saved)
        self._end_text = saved.error
        self._is_lost = saved.is_lost
        if self._client is not None:
            self._client.close()
        self.over.set()

    def _read_outcome(self) -> None:
        """Unpickle the results, again where that failed before: a cell that defines a class may have run since."""
        if not self.over.is_set() or (self._rank_results and not any(item.left_out for item in self._rank_results)):
            return
        with suppress(OSError):
            self.main_rank = int((status_of(self.facts.folder) or {}).get("main_rank") or 0)
            self._rank_results = tuple(saved_result(self.facts.folder, rank, self.view) for rank in self.view.ranks)
            self._error = self._what_ended_it()

    def _what_ended_it(self) -> BaseException | None:
        if not self.facts.folder.is_dir():
            return LaunchError(
                f"{self.facts.name} has ended, and its results are gone: {self._end_text or 'its folder was removed'}."
            )
        if self._is_lost:
            return LaunchError(
                f"{self.facts.name} was lost: {self._end_text}. All output: {shown_path(self.facts.folder)}"
            )
        if not self._is_hosted:
            # its results and its error went to the process that launched it
            failed = self.view.state != "finished"
            return LaunchError(f"{self.facts.name} {self.view.state}: {self._end_text}") if failed else None
        return read_error(self.facts.folder, self._rank_results, self.view)


def main() -> None:
    """Pass on standard input to the socket `sys.argv[1]`, and what comes back to standard output, until one of them ends."""
    sock = connect(Path(sys.argv[1]), _CONNECT_TIMEOUT)
    sock.settimeout(None)

    def pass_on_input() -> None:
        while data := os.read(0, _AT_ONCE):
            sock.sendall(data)
        sock.shutdown(socket.SHUT_RDWR)

    # it ends with this process, also where it waits for more
    threading.Thread(target=pass_on_input, name="accelerate_nb input", daemon=True).start()
    while data := sock.recv(_AT_ONCE):
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
