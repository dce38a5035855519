"""One save from its beginning to the end: who takes part, the files of each process, their commit."""

from __future__ import annotations

import atexit
import hashlib
import hmac
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, cached_property, partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.rank import background_tasks
from accelerate_nb.runtime.checkpoints import folders, manifest
from accelerate_nb.runtime.checkpoints.folders import CheckpointPaths
from accelerate_nb.runtime.checkpoints.host_copy import HostCopier
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, LastFile, named, sync, write_files
from accelerate_nb.runtime.world.registry import has_own_store
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user

# Files are written at the same time because what takes time is the disk, and torch's sums over what it writes.
_THREADS = 4
# How long a process waits for another one in the same save.
LIMIT = 1800.0
# How long the main process waits for the others to begin before it goes on without them, and for those that were not in its last save.
JOIN_TIMEOUT, RETURN_TIMEOUT = 20.0, 0.5
# How long a process waits for the main one to come to its folder, once that has saved to another, or to this one without it.
SETTLE = 5.0
_CONNECT_TIMEOUT = timedelta(seconds=60)
# What a process has of a save of the main one: the first that is said holds.
_JOINED, _ELSEWHERE, _LEFT_OUT = "joined", "elsewhere", "left out"
_FINE, _INTERRUPTED = "fine", "The main process was interrupted."
_MESSAGE_SIZE = 8192


@dataclass
class Saver:
    """The saves of one `Accelerator`; it knows the save that is still being written."""

    world: World
    writing: BackgroundWrite | None = None
    _copier: HostCopier = field(default_factory=HostCopier)
    _channel: SaveChannel | None = field(init=False)

    def __post_init__(self) -> None:
        channels, group = _channels(), self.world.group
        if self.world.size > 1 and group not in channels:
            channels[group] = SaveChannel(self.world)
        self._channel = channels.get(group) if self.world.size > 1 else None

    def wait(self) -> Path | None:
        """Wait for the save that is still being written; the folder that it went to."""
        writing = self.writing
        if writing is None:
            return None
        writing.join()  # where it is interrupted, the save is still being written
        self.writing = None
        writing.wait()
        return writing.folder

    def save(
        self,
        paths: CheckpointPaths,
        files: Callable[[Path, bool], list[FileToWrite]],
        after: Callable[[], None],
        *,
        needs_all: bool,
        blocking: bool,
    ) -> None:
        """
        Save what `files` gives for a draft, and call `after` when it is committed; all processes call it.

        `files` also gets whether all processes take part, so that it may call a collective.
        """
        channel = self._channel
        if channel is not None and channel.busy is not None:
            channel.busy.join()  # another Accelerator's save
        if channel is None:
            agreement = SingleProcessCommit()
        elif self.world.is_main:
            agreement = MainProcessCommit(channel, paths.folder, needs_all)
        else:
            agreement = OtherProcessCommit(channel, paths.folder)
        with named(paths.folder):
            if not agreement.begin(lambda: folders.clear(paths)):
                return
        try:
            with named(paths.folder):
                paths.draft.mkdir(parents=True, exist_ok=True)  # on a machine with a disk of its own
                is_collective = channel is None or (not agreement.is_apart and len(channel.members) == self.world.size)
                wanted = files(paths.draft, is_collective)
                if not blocking:
                    contents = self._copier.copy([file.content for file in wanted])
                    self._copier.finish()
                    wanted = [replace(file, content=content) for file, content in zip(wanted, contents, strict=True)]
        except BaseException as error:
            with suppress(CheckpointError):  # the others receive the reason
                self._finish(agreement, paths, f"{paths.folder} was not written: {error}", lambda: None)
            raise

        def write() -> None:
            self._write(agreement, paths, wanted, _THREADS if blocking else 1)
            after()

        if blocking:
            write()
            return
        self.writing = BackgroundWrite(paths.folder, write)
        if channel is not None:
            channel.busy = self.writing

    def _write(
        self, agreement: SingleProcessCommit, paths: CheckpointPaths, files: list[FileToWrite], threads: int
    ) -> None:
        """Write this process's files; returns when the checkpoint is committed on all."""
        written: dict[str, manifest.ManifestEntry] = {}

        def commit() -> None:
            with named(paths.folder):
                for file in files:
                    if isinstance(file, LastFile):
                        written.update(file.write_last(paths.draft))
                for path in paths.draft.rglob("*"):
                    if path.is_dir() or path.name not in written:
                        sync(path)  # what hooks have written; the other processes' files are there already
                manifest.write(paths.draft, written)
                folders.commit(paths)

        try:
            own = [file for file in files if not isinstance(file, LastFile)]
            written = write_files(own, paths.draft, threads=threads)
        except CheckpointError as error:
            self._finish(agreement, paths, f"{error}. What was there before is unchanged.", commit)  # raises it, on all
            raise
        except BaseException:
            with suppress(CheckpointError):  # the others receive the reason; here it stays an interrupt
                self._finish(agreement, paths, "It was interrupted.", commit)
            raise
        self._finish(agreement, paths, None, commit)
        # there is still a draft: this machine's disk is its own. By now it may be that of the main process's next save
        is_first_of_another = self.world.is_local_main and not self.world.is_main
        if is_first_of_another and written and all((paths.draft / name).exists() for name in written):
            commit()

    def _finish(
        self, agreement: SingleProcessCommit, paths: CheckpointPaths, complaint: str | None, commit: Callable[[], None]
    ) -> None:
        """Have the draft committed or, where a process has a complaint, deleted: by then all have ended their part."""
        try:
            agreement.finish(complaint, commit)
        except CheckpointError:
            if self.world.is_main or agreement.is_apart:
                folders.delete_draft(paths)
            raise


class BackgroundWrite:
    """One checkpoint on its way to the disk, written by a thread that a launched function, and a program that ends, wait for."""

    def __init__(self, folder: Path, work: Callable[[], None]) -> None:
        self.folder = folder
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="accelerate_nb checkpoint writer", daemon=False
        )
        atexit.register(self._print_failure)  # one that has not been raised by then
        background_tasks.register(self.wait)
        self._thread.start()

    def join(self) -> None:
        """Wait until nothing is written any more; after an interrupt it can be called again."""
        # up to Python 3.12, `Thread.join` takes a thread for ended once it was interrupted; in a forked process there is none
        if self._thread.is_alive():
            self._is_over.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is in its folder; a `CheckpointError` names the reason why it is not."""
        self.join()
        atexit.unregister(self._print_failure)
        background_tasks.forget(self.wait)
        if self._error is not None:
            raise CheckpointError(
                f"The checkpoint that was written in the background did not come about: {self._error} "
                "The former one is unchanged. Save again, or with blocking=True."
            ) from self._error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in `wait`
            self._error = error
        finally:
            self._is_over.set()

    def _print_failure(self) -> None:
        self.join()
        if self._error is not None:
            sys.stderr.write(f"The checkpoint {self.folder} was not written: {self._error}\n")


class SaveChannel:
    """One process's connection to the others about its saves: the run's store, and a group of those who take part."""

    # Who saves is agreed on in the store, since loops may call `save_state` on the main process alone, as Accelerate lets them.
    # The group is one of gloo, in which the death of a process is noticed at once. Each text has a signature that only
    # processes of the run can make: its key is the run's id (`TORCHELASTIC_RUN_ID`), which a launch draws by chance.

    def __init__(self, world: World) -> None:
        self.world = world
        self._store_of_run: Any = world.store
        self._key = os.environ.get("TORCHELASTIC_RUN_ID", "").encode()
        # in a store that was another group's before, its saves do not concern this process; of its own group's none was before it,
        # even if the main process has begun one while this one was still making its Accelerator
        self.next = 1 if has_own_store() else self.newest() + 1
        # processes that were not in the main process's last save
        self.absent: set[int] = set()
        self.members: list[int] = []
        # a save that is still being written
        self.busy: BackgroundWrite | None = None
        self._gloo: Any = None
        self.group = 0
        report_end = partial(_report_end, weakref.ref(self))
        # the first is for a launched function; the second for scripts, and for children of multiprocessing, which have no atexit
        background_tasks.register(report_end)
        Finalize(None, report_end, exitpriority=0)

    # The store

    @cached_property
    def _store(self) -> dist.Store:
        """A connection of its own, made when the first save needs it: torch asks the resolver for the host's name at each."""
        # held no longer: one that this process hosts ends with the program's own group
        store, self._store_of_run = self._store_of_run, None
        return dist.PrefixStore("accelerate_nb/checkpoint", store.clone())

    def newest(self, *, begins: bool = False) -> int:
        """The number of the main process's newest save, which begins now or has begun."""
        return int(self._store.add("saves", int(begins)))

    def put(self, name: str, content: Any) -> Any:
        """Keep a value where there is none; returns the one that is there then."""
        store: Any = self._store
        return json.loads(self._text(name, store.compare_set(name, "", self._signed(name, json.dumps(content)))))

    def get(self, name: str) -> Any:
        """A value of the store, once it is there."""
        if not self.are_there([name], LIMIT):
            raise CheckpointError(f"The other processes have saved nothing for {LIMIT:g} seconds ({name}).")
        return json.loads(self._text(name, self._store.get(name)))

    def are_there(self, names: Sequence[str], limit: float) -> bool:
        """Whether all of these are in the store within some seconds."""
        end, pause = time.monotonic() + limit, 0.001
        # the store's own way to wait can't be interrupted, and complains on stderr of each timeout
        while names and not self._store.check(list(names)):
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    # The group of those who save

    def connect(self, members: list[int], group: int) -> None:
        """Connect the processes that take part in a save; `group` is the number of the save for which their group was made."""
        if group == self.group or len(members) == 1:
            return
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs don't know its arguments
        store = dist.PrefixStore(f"{group}/group", self._store)
        try:
            self._gloo = gloo(store, members.index(self.world.rank), len(members), _CONNECT_TIMEOUT)
        except RuntimeError as error:
            self.disconnect()
            raise CheckpointError(
                f"Ranks {', '.join(map(str, members))} began to save together, but could not be connected by gloo: {error}. Where "
                "the network has several interfaces, name the one between the nodes in GLOO_SOCKET_IFNAME."
            ) from error
        self.members, self.group = members, group

    def disconnect(self) -> None:
        """Leave the group, so that the next save makes another."""
        self.members, self._gloo, self.group = [], None, 0

    def send(self, rank: int, text: str) -> None:
        """Send a text to a process that receives one, else a `RuntimeError` is raised."""
        content = self._signed("message", text[: _MESSAGE_SIZE // 8]).encode().ljust(_MESSAGE_SIZE, b"\0")
        message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._gloo.send([message], self.members.index(rank), 0).wait(timedelta(seconds=LIMIT))

    def receive(self, rank: int, limit: float = LIMIT) -> str:
        """The text that a process sends; a `RuntimeError` where it has died, or sends none for so many seconds."""
        message = torch.empty(_MESSAGE_SIZE, dtype=torch.uint8)
        self._gloo.recv([message], self.members.index(rank), 0).wait(timedelta(seconds=limit))
        return self._text("message", message.numpy().tobytes().rstrip(b"\0"))

    def has_died(self, rank: int) -> bool:
        """Whether a process that was in the last save, and does not come to this one, has ended otherwise than in peace."""
        if rank not in self.members or self._store.check([f"ended/{rank}"]):
            return False
        try:
            self.receive(rank, 0.1)
        except RuntimeError as error:
            # what it does not answer in time closes the group's connections, too
            return "closed by peer" in str(error) or "reset by peer" in str(error)
        return False

    def _signed(self, name: str, text: str) -> str:
        return hmac.new(self._key, f"{name}\n{text}".encode(), hashlib.sha256).hexdigest() + text

    def _text(self, name: str, value: bytes) -> str:
        text = value[64:].decode(errors="replace")
        if not hmac.compare_digest(self._signed(name, text).encode(), value):
            raise CheckpointError(
                f"{name!r} of the run's saves was written by a process that is none of the run: no checkpoint was written. Another "
                "user of this machine may have done so; docs/security.md names what can be written to."
            )
        return text


def _report_end(reference: weakref.ref[SaveChannel]) -> None:
    """The process has reached its end in peace: the others need not miss it."""
    channel = reference()
    if channel is None or "_store" not in vars(channel):
        # it was in no save
        return
    # whichever exception ends an interpreter is kept as its last; that which ends a child is being handled now
    if sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:
        # no reply is waited for: the process that holds the store may have gone, of which torch writes its stack into the log
        with suppress(RuntimeError):
            channel._store.set(f"ended/{channel.world.rank}", "")


@cache
def _channels() -> WeakKeyDictionary[Any, SaveChannel]:
    """By group: a process makes one connection for all of its Accelerators, and a new one after it has joined another group."""
    return WeakKeyDictionary()


class SingleProcessCommit:
    """The commit of a single process."""

    # whether this process has to commit a folder of its own
    is_apart = False

    def begin(self, clear: Callable[[], None]) -> bool:
        """Have the draft cleared before anybody writes to it; returns whether this process takes part in the save."""
        clear()
        return True

    def finish(self, complaint: str | None, commit: Callable[[], None]) -> None:
        """Have the draft committed once all processes have written; a `CheckpointError` is raised on all if one has a complaint."""
        if complaint is not None:
            raise CheckpointError(complaint)
        commit()


@dataclass(eq=False)
class MainProcessCommit(SingleProcessCommit):
    """The main process among others: it publishes its folder, waits until their files are written, and commits."""

    _channel: SaveChannel
    _folder: Path
    _needs_all: bool
    _number: int = 0
    _others: list[int] = field(default_factory=list)

    def begin(self, clear: Callable[[], None]) -> bool:
        channel = self._channel
        self._number = channel.newest(begins=True)
        channel.put(f"{self._number}", str(self._folder))
        try:
            self._others = self._joined()
            clear()
            members = [0, *self._others]
            group = channel.group if members == channel.members else self._number
            channel.put(f"{self._number}/plan", [members, group])
            channel.connect(members, group)
        except BaseException as error:
            reason: Any = str(error) if isinstance(error, (OSError, CheckpointError)) else _INTERRUPTED
            if isinstance(error, ConfigurationError):
                reason = {"mistake": str(error)}
            channel.put(f"{self._number}/plan", reason)  # where there is no plan yet
            channel.put(f"{self._number}/over", "")
            raise
        return True

    def finish(self, complaint: str | None, commit: Callable[[], None]) -> None:
        verdict, channel = _INTERRUPTED, self._channel
        try:
            replies = [complaint or _FINE]
            for rank in self._others:
                try:
                    replies.append(channel.receive(rank))
                except RuntimeError as error:
                    replies.append(_death(rank, error))
            found = next((reply for reply in replies if reply != _FINE), _FINE)
            if found == _FINE:
                commit()
            verdict = found
        except CheckpointError as error:
            verdict = str(error)
            raise
        finally:
            # of an interrupted process the others are not known to listen: the group's end is their answer
            for rank in self._others if verdict != _INTERRUPTED else ():
                with suppress(RuntimeError):  # one that has died
                    channel.send(rank, verdict)
            channel.put(f"{self._number}/over", "")
            if verdict != _FINE:
                channel.disconnect()
        if verdict != _FINE:
            raise CheckpointError(complaint or f"{self._folder} was not written: another process failed. {verdict}")

    def _joined(self) -> list[int]:
        """The processes that have begun the same save; who has not after a while is absent, unless it has died or is needed."""
        channel = self._channel
        others = range(1, channel.world.size)
        names = {rank: f"{self._number}/{rank}" for rank in others}
        expected = [names[rank] for rank in others if self._needs_all or rank not in channel.absent]
        channel.are_there(expected, LIMIT if self._needs_all else JOIN_TIMEOUT)
        channel.are_there(list(names.values()), RETURN_TIMEOUT)
        statuses = {rank: channel.put(name, _LEFT_OUT) for rank, name in names.items()}
        absent = {rank for rank, status in statuses.items() if status == _LEFT_OUT}
        for rank in sorted(absent - channel.absent):
            if channel.has_died(rank):
                channel.disconnect()
                raise CheckpointError(_death(rank))
        listed = ", ".join(map(str, sorted(absent)))
        if absent and self._needs_all:
            raise CheckpointError(
                f"save_state was called on the main process, and not on rank {listed}, which has parts of the weights. Call "
                "save_state on every process."
            )
        if absent - channel.absent:
            channel.disconnect()
            warn_user(
                f"save_state was called on the main process, and {JOIN_TIMEOUT:g} seconds later not on rank {listed}: the "
                "checkpoint lacks the own state of these ranks (random states, positions of loaders). Call save_state on every "
                "process; where that is intended, later saves don't wait."
            )
        channel.absent = absent
        return [rank for rank, status in statuses.items() if status == _JOINED]


@dataclass(eq=False)
class OtherProcessCommit(SingleProcessCommit):
    """Another process: its part is in the main one's save to the same folder; where there is none it commits its files alone."""

    _channel: SaveChannel
    _folder: Path

    def begin(self, clear: Callable[[], None]) -> bool:
        try:
            takes_part = self._find()
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._folder} was not written: the main process does not save, or is gone. {error}"
            ) from error
        if self.is_apart:
            clear()
        return takes_part

    def finish(self, complaint: str | None, commit: Callable[[], None]) -> None:
        if self.is_apart:
            super().finish(complaint, commit)
            return
        try:
            self._channel.send(0, complaint or _FINE)
            verdict = self._channel.receive(0)
        except RuntimeError as error:
            verdict = _death(0, error)
        if verdict != _FINE:
            self._channel.disconnect()
            raise CheckpointError(complaint or f"{self._folder} was not written: another process failed. {verdict}")

    def _find(self) -> bool:
        """Take part in the main process's save to the folder, or be apart; `False` where it was over without this process."""
        channel, rank, own_folder = self._channel, self._channel.world.rank, str(self._folder)
        passed, passed_number = "", 0
        while channel.are_there([f"{channel.next}"], SETTLE if passed else LIMIT):
            number, channel.next = channel.next, channel.next + 1
            folder = channel.get(f"{number}")
            is_mine = folder == own_folder
            status = channel.put(f"{number}/{rank}", _JOINED if is_mine else _ELSEWHERE)
            if status == _JOINED:
                plan = channel.get(f"{number}/plan")
                if isinstance(plan, dict):
                    raise ConfigurationError(plan["mistake"])
                if not isinstance(plan, list):
                    raise CheckpointError(f"{folder} was not written: another process failed. {plan}")
                channel.connect(*plan)
                return True
            if is_mine:
                passed, passed_number = folder, number
            elif status == _ELSEWHERE and passed != own_folder:
                passed, passed_number = folder, passed_number or number
            if is_mine or status == _ELSEWHERE:
                channel.get(f"{number}/over")
        if not passed:
            raise CheckpointError(
                f"{self._folder} was not written: the main process did not save for {LIMIT:g} seconds."
            )
        # a later save of the main process belongs to a later one of this process
        channel.next = passed_number + 1
        self.is_apart = passed != own_folder
        if self.is_apart:
            warn_user(
                f"save_state was called with {self._folder} on rank {rank}, and with {passed} on the main process: this process's "
                "own files are in its folder, and those that all have in common in the main process's. Pass the same folder on "
                "every process."
            )
        else:
            warn_user(
                f"save_state was called on rank {rank} when the others had saved {passed} already, without this rank's own state "
                "(random states, positions of loaders)."
            )
        return self.is_apart


def _death(rank: int, error: RuntimeError | None = None) -> str:
    detail = "" if error is None else f" ({str(error).strip().splitlines()[0][:300]})"
    return (
        f"Rank {rank} has died before it wrote its files, so there is no new checkpoint; what was there before is unchanged. Look in "
        f"that rank's output for the cause, and start the run again.{detail}"
    )
