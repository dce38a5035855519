"""What a session's workers run: one task after the other, until the session is closed."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import FrameType, ModuleType, TracebackType
from typing import Any

from accelerate_nb.events import pending
from accelerate_nb.events.asks import current_asks
from accelerate_nb.events.emit import emit, outlet
from accelerate_nb.events.model import Answered
from accelerate_nb.launching import streams
from accelerate_nb.launching.culprits import explain
from accelerate_nb.launching.freeing import abort_devices, cut_connections, cut_from_store
from accelerate_nb.launching.inbox import Inbox, Message, current_inbox
from accelerate_nb.launching.outcome import failure_of, portable
from accelerate_nb.launching.packing import Bytes, map_entries, write_entries
from accelerate_nb.launching.pickling import dump_homeward, load
from accelerate_nb.launching.sources import Sources, sources_of
from accelerate_nb.launching.tasks import RETURNED, Answer, Cell, Invoke, Letter, Pull, Push

# What is there in the first cell already.
_SETTING = """
from accelerate_nb import Accelerator
accelerator = Accelerator()
rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
"""
# How long an interrupt may take to be seen, before it is taken that the rank waits for others in compiled code.
_PATIENCE = 0.4
# Where torch waits for other ranks: who fails there has left the groups in a state that nobody knows.
_COLLECTIVE = (os.path.join("torch", "distributed"), os.path.join("nn", "parallel", "distributed.py"))

# What to do where a group is used that a renewal has ended.
_GONE = (
    "After an earlier failure the process groups were made anew, and those of your own (new_group, device meshes) went with "
    "it. Make them again."
)


def session() -> None:
    """Be a session's worker: tell that one is ready, then do what the kernel says, in this thread, one task after the other."""
    told, sender = current_inbox(), outlet()
    assert told is not None
    assert sender is not None
    desk = Desk(sender.rank)
    desk.open(told)
    desk.work()


@dataclass(frozen=True, slots=True)
class _Due:
    """A task that has come: its number, the descriptors of letter and answer, and under what name groups are renewed before."""

    number: int
    letter: int
    answer: int
    renewal: str | None
    others: Sequence[int]


class Desk:
    """One worker's tasks; those that come while one is done wait."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._due: queue.SimpleQueue[_Due | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._number: int | None = None
        self._asked = False
        self._early: set[int] = set()
        self._can_be_stopped = False
        self._done = threading.Event()
        self._main = ModuleType("__main__")
        self._known: frozenset[str] = frozenset()
        # groups of the person's own that went when groups were made anew
        self._gone = 0

    # ---------------------------------------------------------------------------------------- in the inbox's thread

    def hear_task(self, said: Message, descriptors: Sequence[int]) -> None:
        """A task has come."""
        letter, answer = descriptors
        self._due.put(_Due(said["number"], letter, answer, said["renewal"], said["others"]))

    def hear_interrupt(self, said: Message, _: Sequence[int]) -> None:
        """A task is to be interrupted, if it is this one that is being done."""
        with self._lock:
            if self._number != said["number"]:
                # it comes too early, and is seen when the task begins; or too late
                self._early.add(said["number"])
                return
            self._asked = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        threading.Thread(
            target=self._free, args=(said["number"], said["others"]), name="accelerate_nb freeing", daemon=True
        ).start()

    def hear_close(self, *_: Any) -> None:
        """The session is closed: what has come is done still."""
        self._due.put(None)

    def _free(self, number: int, others: Sequence[int]) -> None:
        """Free the main thread, where it does not see the interrupt because it waits for others."""
        if self._done.wait(_PATIENCE) or self._number != number:
            return
        port = int(os.environ["MASTER_PORT"])
        cut_connections(others, store_port=port)
        abort_devices()
        if not self._done.wait(_PATIENCE) and self._number == number:
            cut_from_store(port)

    # ------------------------------------------------------------------------------------------ in the main thread

    def open(self, told: Inbox) -> None:
        """Make the place in which cells run, and begin to hear."""
        from accelerate_nb.launching.shell import new_shell

        sys.modules["__main__"] = self._main
        self._shell = new_shell(self._main)
        exec(compile(_SETTING, "<accelerate_nb>", "exec"), vars(self._main))
        told.on("task", self.hear_task)
        told.on("interrupt", self.hear_interrupt)
        told.on("close", self.hear_close)
        emit(Answered(self._rank, 0))

    def work(self) -> None:
        """Do what comes, until nothing more will."""
        while (due := self._due.get()) is not None:
            signal.signal(signal.SIGINT, self._interrupted)
            self._do(due)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        """SIGINT: from our own thread it is for the task, and comes too late where that is over; from the kernel it is for all."""
        if not self._asked or self._can_be_stopped:
            raise KeyboardInterrupt

    def _do(self, due: _Due) -> None:
        began = time.monotonic()
        self._done.clear()
        current_asks().reset()
        with self._lock:
            self._number, self._asked = due.number, due.number in self._early
        try:
            self._can_be_stopped = True
            answer = self._answer(due) if not self._asked else self._failed(KeyboardInterrupt())
            self._can_be_stopped = False
        except KeyboardInterrupt as error:
            if not self._asked:
                raise
            answer = self._failed(error)
        self._can_be_stopped = False
        if self._asked and answer.failure is not None:
            answer = replace(answer, failure=replace(answer.failure, ended_by_us=True))
        with self._lock:
            self._number = None
            self._early.clear()
        self._done.set()
        seconds = time.monotonic() - began
        self._leave(due, replace(answer, seconds=seconds, groups=_collectives(), names=_names(self._shell)))

    def _answer(self, due: _Due) -> Answer:
        try:
            if due.renewal is not None:
                cut_connections(due.others, store_port=int(os.environ["MASTER_PORT"]))
                self._gone += import_module("accelerate_nb.runtime.renewing").renew(due.renewal)
            letter: Letter = load(map_entries(due.letter))
            self._known = letter.known
            self._learn(letter)
            match letter.task:
                case Cell() as cell:
                    return self._run(cell)
                case Push(values):
                    vars(self._main).update(values)
                case Pull(names):
                    return Answer(0.0, value=self._pulled(names))
                case Invoke() as invoke:
                    value = invoke.function(*invoke.args, **invoke.kwargs)
                    pending.finish()
                    return Answer(0.0, value={RETURNED: value})
                case None:
                    pass
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - told in the notebook; the worker goes on
            return Answer(0.0) if _is_no_failure(error) else self._failed(error)
        return Answer(0.0)

    def _run(self, cell: Cell) -> Answer:
        bundle, metadata, error = self._shell.run(cell)
        if error is None or _is_no_failure(error):
            return Answer(0.0) if cell.silent else Answer(0.0, result=bundle, metadata=metadata)
        return self._failed(error)

    def _pulled(self, names: Sequence[str]) -> dict[str, Any]:
        here = vars(self._main)
        for name in names:
            if name not in here:
                raise NameError(
                    f"{name!r} was asked for, but rank {self._rank} has no such variable. "
                    f"There are: {', '.join(_names(self._shell))}."
                )
        return {name: here[name] for name in names}

    def _learn(self, letter: Letter) -> None:
        """Take in the notebook's lines, and its functions and classes under their names, where the worker has none of its own."""
        Sources(letter.lines, letter.numbers).install()
        self._shell.compile._filename_map.update(letter.numbers)
        for name, value in letter.names.items():
            vars(self._main).setdefault(name, value)

    def _failed(self, error: BaseException) -> Answer:
        sources = self._sources()
        _name_cell(error, sources)
        frames = _frames(error)
        failure = failure_of(error.with_traceback(_below(error.__traceback__, sources)), self._rank, sources)
        in_collective = any(part in one for one in frames for part in _COLLECTIVE)
        if in_collective and self._gone and not failure.advice:
            failure = replace(failure, advice=_GONE)
        return Answer(0.0, failure=failure, error=portable(error, self._known), in_collective=in_collective)

    def _sources(self) -> Sources:
        return sources_of(self._shell.compile._filename_map)

    def _leave(self, due: _Due, answer: Answer) -> None:
        """Leave the answer where the kernel looks for it, and say so after all that was written."""
        try:
            write_entries(due.answer, self._packed(answer))
        finally:
            os.close(due.answer)
            os.close(due.letter)
        streams.flush()
        emit(Answered(self._rank, due.number))

    def _packed(self, answer: Answer) -> list[Bytes]:
        try:
            return dump_homeward(answer, self._known)
        except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
            failed = self._failed(explain(answer.value or {}, error, self._sources()))
            told = replace(failed, seconds=answer.seconds, groups=answer.groups, names=answer.names)
            return dump_homeward(told, self._known)


def _is_no_failure(error: BaseException) -> bool:
    """Whether somebody has left a cell or a function in good order."""
    return isinstance(error, SystemExit) and error.code in {None, 0}


def _collectives() -> dict[str, int]:
    if "torch.distributed" not in sys.modules:
        return {}
    counts: dict[str, int] = import_module("accelerate_nb.runtime.renewing").collectives()
    return counts


def _names(shell: Any) -> tuple[str, ...]:
    """The person's variables."""
    names = list(shell.user_ns)
    return tuple(sorted(name for name in names if not name.startswith("_") and name not in shell.user_ns_hidden))


def _name_cell(error: BaseException, sources: Sources) -> None:
    """A syntax error says itself where it is, in the words of a file."""
    if isinstance(error, SyntaxError) and error.filename is not None and error.filename in sources.numbers:
        error.filename = sources.name(error.filename)


def _frames(error: BaseException) -> list[str]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return found


def _below(trace: TracebackType | None, sources: Sources) -> TracebackType | None:
    """A traceback from the first line of a cell on: how that came to run is nothing to be read."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename not in sources.lines:
        first = first.tb_next
    return first or trace
