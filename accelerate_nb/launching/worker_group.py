"""One group of workers, followed from its start until every process has ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from accelerate_nb.events.asks import Position
from accelerate_nb.events.capture import Line, LineAssembler
from accelerate_nb.events.channel import EventReader
from accelerate_nb.events.model import (
    OVER,
    Answered,
    DeviceSample,
    Event,
    Failure,
    HostSample,
    LogLine,
    Quiet,
    State,
    StateChange,
    Stream,
)
from accelerate_nb.events.record import Record
from accelerate_nb.events.view import RunView
from accelerate_nb.launching.diagnosis import Look, diagnosis, is_at_work
from accelerate_nb.launching.ending import Ending, died
from accelerate_nb.launching.engines.base import Placing, Workers
from accelerate_nb.launching.inbox import tell
from accelerate_nb.launching.outcome import Raised, Returned, read_outcome
from accelerate_nb.launching.plan import Plan, meeting_place
from accelerate_nb.launching.silence import Silence
from accelerate_nb.launching.sources import Sources
from accelerate_nb.launching.stacks import SIGNAL, answers, crash_text, lengths, replies
from accelerate_nb.launching.stopping import Asking
from accelerate_nb.launching.wires import Wires

# Asked at a step that all ranks share, interrupted wherever they are, or ended on the spot.
Stop: TypeAlias = Literal["finish", "interrupt", "kill"]
_FORCE: tuple[Stop | None, ...] = (None, "finish", "interrupt", "kill")

# Pipes are emptied at most this often: a reader that wakes for every line costs the workers more than the lines do.
_BETWEEN_READS = 0.02
_READ_AT_ONCE = 1 << 20
# Where nothing was written for so long, the pipes are watched instead of looked into, and it is looked this often at what
# else may be due.
_DOZES_AFTER = 1.0
_DOZE = 1.0
# After the first failure: how long others may still report their own, and then end by themselves. A rank that only lost
# its connection waits longer for the one that caused it, which may still be cleaning up.
_SETTLE = 0.15
_SETTLE_WITHOUT_CAUSE = 1.0
_GRACE_AFTER_FAILURE = 0.6
# How long workers may take to end once all have returned.
_PARTING = 2.5
# How many lines a process that died without an exception is quoted with.
_LAST_LINES = 8


@dataclass(slots=True)
class Scene:
    """What a run's attempts share: where events go, what is known of the notebook's lines, and what others ask of them."""

    view: RunView
    record: Record
    sources: Sources
    deadline: float | None
    grace: float
    quiet: float = 0.0
    wake: Callable[[], None] = lambda: None
    heard: Callable[[Event], None] = lambda _: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, event: Event) -> None:
        """Keep an event, from any thread."""
        with self._lock:
            self.view.apply(event)
            self.record.event(event)
        self.heard(event)


class Attempt:
    """
    Starts a plan's workers, reads what they say, and ends them.

    `follow` is called once, in the run's thread; `stop` and `stacks` may be called from any other.
    """

    def __init__(self, plan: Plan, placing: Placing, scene: Scene, number: int) -> None:
        self._plan, self._placing, self._scene, self._number = plan, placing, scene, number
        self._wires: list[Wires] = []
        self._reported: dict[int, float] = {}
        self._states: dict[int, State] = {}
        self._assemblers: dict[tuple[int, Stream], LineAssembler] = {}
        self._readers: dict[int, EventReader] = {}
        self._asked: Stop | None = None
        self._killed: set[int] = set()
        self._failed_at: float | None = None
        self._cause_is_known = False
        self._stacks_lock = threading.Lock()
        self._tell_lock = threading.Lock()
        self._heard: set[int] = set()
        self._gone: set[int] = set()
        # how many lines a session's rank had written when it last had nothing to do: they are not its last words
        self._said_before: dict[int, int] = {}
        self._questions: list[int] = []
        self.began = False
        self._asking: Asking | None = None
        self._silence = Silence(scene.quiet, time.monotonic())
        self._observer: threading.Thread | None = None
        self._wrote_last = time.monotonic()
        self._found: tuple[float, str] | None = None
        self._closed = False
        self.timed_out: Look | None = None
        self.lost: str | None = None

    @property
    def last_step(self) -> int | None:
        """The step after which ranks stopped because they were asked to."""
        return self._asking.last_step if self._asking is not None and self._asking.came_to_it else None

    def follow(self) -> tuple[Ending, ...]:
        """Run the workers to their end; gives every rank's ending, in the order of ranks."""
        waker_far, waker = socket.socketpair()
        for end in (waker_far, waker):
            end.setblocking(False)
        self._scene.wake = lambda: _poke(waker)
        self._urgent, self._logs = selectors.DefaultSelector(), selectors.DefaultSelector()
        with waker_far, waker, self._urgent, self._logs:
            self._urgent.register(waker_far, selectors.EVENT_READ, lambda: waker_far.recv(4096))
            try:
                self._start()
                self._until_over()
                self._until_gone()
                self._drain()
                return self._endings()
            finally:
                self._scene.wake = lambda: None
                self._close()

    def stop(self, how: Stop) -> None:
        """Ask for the end; what was asked with more force before stays."""
        self._asked = stronger(self._asked, how)
        self._scene.wake()

    def tell(self, rank: int, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message to a worker's inbox; whether there was somebody to take it."""
        with self._tell_lock:
            return tell(self._wires[rank].events, message, descriptors)

    def look(self) -> Look:
        """Where every rank is now; takes up to some seconds."""
        returned = sorted(rank for rank, state in self._states.items() if state == "finished")
        stacks = self.stacks()
        return Look(stacks, self._collectives(stacks), returned)

    def stacks(self) -> dict[int, str]:
        """What every rank whose function runs answers when it is asked where it is."""
        with self._stacks_lock:
            running = [
                rank for rank in range(len(self._wires)) if rank not in self._gone and rank not in self._reported
            ]
            # a process that has not said a word yet is not ready for the signal, and would be ended by it
            ranks = [rank for rank in running if rank in self._heard]
            files = [self._wires[rank].stacks for rank in ranks]
            before = lengths(files)
            self._workers.signal(SIGNAL, ranks)
            return {**dict.fromkeys(running, ""), **dict(zip(ranks, answers(files, before), strict=True))}

    def _collectives(self, ranks: Iterable[int]) -> dict[int, Any]:
        """What each rank says of the collectives that are under way in it, as far as it answers in time."""
        with self._stacks_lock:
            asked: dict[int, int] = {}
            for rank in ranks:
                if rank not in self._heard or self._closed:
                    continue
                asked[rank], its = os.pipe()
                self.tell(rank, {"do": "collectives"}, [its])
                os.close(its)
            return replies(asked)

    # ------------------------------------------------------------------------------------------------------- steps

    def _start(self) -> None:
        self._workers: Workers
        with meeting_place(self._plan.port) as meeting:
            self._wires = [Wires.lay() for _ in range(self._plan.size)]
            for rank, wires in enumerate(self._wires):
                self._listen(rank, wires)
                self._scene.take(StateChange(rank, "starting", time.time()))
            self._workers = self._placing.start(self._plan.orders(self._wires, meeting, self._number))
        for wires in self._wires:
            wires.let_go()
        for descriptor in self._workers.watched():
            self._urgent.register(descriptor, selectors.EVENT_READ, self._hear_workers)

    def _listen(self, rank: int, wires: Wires) -> None:
        self._readers[rank] = EventReader()
        self._urgent.register(wires.events, selectors.EVENT_READ, lambda: self._hear_events(rank))
        outputs: tuple[tuple[Stream, int], ...] = (("stdout", wires.stdout), ("stderr", wires.stderr))
        for stream, descriptor in outputs:
            self._assemblers[rank, stream] = LineAssembler()
            self._logs.register(descriptor, selectors.EVENT_READ, (rank, stream, descriptor))

    def _until_over(self) -> None:
        """Until every rank has returned, or there is a reason to end them; then they are ended."""
        read_next = 0.0
        while not self._all_reported():
            now = time.monotonic()
            if now >= read_next:
                self._read_logs()
                read_next = now + _BETWEEN_READS
            self._step(self._doze(now) if self._may_doze(now) else _BETWEEN_READS)
            self._mind_the_silence()
            if self._asked == "finish" and self._asking is None:
                self._asking = self._ask_to_hold()
            if self._asked in {"interrupt", "kill"} or self._is_asked_in_vain():
                return self._end_with_grace(self._scene.grace)
            if self._is_late():
                self.timed_out = self.look()
                return self._kill()
            if self.lost is not None:
                return self._kill()
            if self._has_settled():
                return self._end_with_grace(_GRACE_AFTER_FAILURE)
        return None

    def _may_doze(self, now: float) -> bool:
        is_quiet = now - self._wrote_last > _DOZES_AFTER and not self._is_observed()
        nothing_is_asked = self._asked is None and self._asking is None and self._failed_at is None
        return is_quiet and nothing_is_asked and bool(self._workers.watched())

    def _doze(self, now: float) -> float:
        """Be woken by whatever is written; for how long nothing else needs a look."""
        # Linux's and macOS's selectors can be waited for themselves
        logs = self._logs.fileno()
        if logs not in self._urgent.get_map():
            self._urgent.register(logs, selectors.EVENT_READ, lambda: self._wake(logs))
        due = [self._silence.due, *([self._scene.deadline] if self._scene.deadline is not None else [])]
        return min(max(min(due) - now, 0.0), _DOZE)

    def _wake(self, logs: int) -> None:
        self._urgent.unregister(logs)
        self._wrote_last = time.monotonic()

    def _mind_the_silence(self) -> None:
        """Where nothing has come for long, find out in a thread of its own where the ranks are, and say so in this one."""
        found, self._found = self._found, None
        if found is not None and found[0] == self._silence.since:
            lasts = time.monotonic() - found[0]
            said = f"Nothing has come from any rank for {lasts:.0f} s.\n{found[1]}"
            self._scene.take(Quiet(lasts, said, time.time()))
        if self._silence.is_due(time.monotonic()) and not self._is_observed():
            self._observer = threading.Thread(target=self._observe, name="accelerate_nb observer", daemon=True)
            self._observer.start()

    def _is_observed(self) -> bool:
        return self._observer is not None and self._observer.is_alive()

    def _observe(self) -> None:
        since = self._silence.since
        look = self.look()
        if is_at_work(look):
            self._found = since, diagnosis(look, self._scene.sources)
            self._scene.wake()

    def listen_anew(self, patience: float) -> None:
        """A silence begins anew, because somebody asks the workers for something else; it is told of after so many seconds."""
        self._silence.patience = patience
        self._break_silence()
        self._scene.wake()

    def _break_silence(self) -> None:
        if self._silence.broken(time.monotonic()):
            self._scene.take(Quiet(0, "", time.time()))

    def _ask_to_hold(self) -> Asking:
        """Ask every rank that runs to wait at the end of its step, and to tell how far it is."""
        ranks = [rank for rank in range(self._plan.size) if rank not in self._reported]
        asking = Asking(ranks, self._scene.grace, time.monotonic())
        for rank in ranks:
            self._ask(rank, {"do": "hold"}, partial(self._take_position, asking, rank))
        return asking

    def _ask(self, rank: int, message: Mapping[str, Any], take: Callable[[Any], None]) -> None:
        """Ask a worker something; `take` gets its answer, in the run's thread, or `None` from one that can't give any."""
        mine, its = os.pipe()
        try:
            heard = rank in self._heard and self.tell(rank, message, [its])
        finally:
            os.close(its)
        if not heard:
            os.close(mine)
            take(None)
            return
        self._questions.append(mine)
        self._urgent.register(mine, selectors.EVENT_READ, lambda: self._hear_answer(mine, take))

    def _hear_answer(self, pipe: int, take: Callable[[Any], None]) -> None:
        said = os.read(pipe, _READ_AT_ONCE)
        self._urgent.unregister(pipe)
        self._questions.remove(pipe)
        os.close(pipe)
        take(json.loads(said) if said else None)

    def _take_position(self, asking: Asking, rank: int, said: list[Any] | None) -> None:
        asking.answer(rank, None if said is None else Position(*said), time.monotonic())
        if asking.last_step is not None:
            for each in asking.ranks:
                self.tell(each, {"do": "until", "steps": asking.last_step, "raises": asking.raises})

    def _is_asked_in_vain(self) -> bool:
        return self._asking is not None and self._asking.is_in_vain(self._reported, time.monotonic())

    def _end_with_grace(self, grace: float) -> None:
        """Interrupt those that run, and kill those that are still there when the grace is over."""
        self._interrupt()
        deadline = time.monotonic() + grace
        while not self._all_reported() and time.monotonic() < deadline and self._asked != "kill":
            self._read_logs()
            self._step(_BETWEEN_READS)
        if not self._all_reported():
            self._kill()

    def _until_gone(self) -> None:
        """Let the workers leave, and wait until each process has ended."""
        for rank in range(self._plan.size):
            self.tell(rank, {"do": "leave"})
        deadline = time.monotonic() + _PARTING
        while len(self._workers.exit_codes()) < self._plan.size and self._workers.lost() is None:
            if time.monotonic() > deadline:
                self._kill()
            self._read_logs()
            self._step(_BETWEEN_READS)
        if self._workers.lost() is not None:
            self._kill()

    def _step(self, timeout: float) -> None:
        for key, _ in self._urgent.select(timeout):
            key.data()
        if not self._workers.watched():
            self._hear_workers()

    def _interrupt(self) -> None:
        begun = {mate for rank in self._heard for mate in self._plan.mates(rank)}
        # the others have not begun anything, and may not be listening yet
        others = set(range(self._plan.size)) - begun
        self._killed.update(others)
        self._workers.signal(signal.SIGINT, begun)
        self._workers.signal(signal.SIGKILL, others)

    def _kill(self) -> None:
        self._killed.update(range(self._plan.size))
        self._workers.kill()

    def _close(self) -> None:
        self._scene.record.flush()
        for pipe in self._questions:
            os.close(pipe)
        with self._stacks_lock:
            self._closed = True
            # nobody is asked any more
            self._gone.update(range(self._plan.size))
            if hasattr(self, "_workers"):
                self._workers.kill()
                self._workers.close()
            for wires in self._wires:
                wires.cut()

    # ----------------------------------------------------------------------------------------------------- hearing

    def _hear_workers(self) -> None:
        self._workers.news()
        for rank, code in self._workers.exit_codes().items():
            self._gone.add(rank)
            if rank not in self._reported:
                # what it said last may still be on its way
                self._hear_events(rank)
            if rank not in self._reported:
                self._reported[rank] = time.time()
                self._cause_is_known = True
                self._fail()
                by_us = self._was_killed_by_us(rank, code)
                state: State = "stopped" if by_us else "failed"
                detail = "ended with the others" if by_us else f"exit code {code}"
                self._scene.take(StateChange(rank, state, time.time(), detail))
        self.lost = self._workers.lost()
        watched = self._workers.watched()
        for descriptor in [key.fd for key in self._urgent.get_map().values() if key.data == self._hear_workers]:
            # what tells of an end once would do so for ever
            if descriptor not in watched:
                self._urgent.unregister(descriptor)

    def _hear_events(self, rank: int) -> None:
        sock = self._wires[rank].events
        try:
            data = sock.recv(_READ_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if sock.fileno() in self._urgent.get_map():
                self._urgent.unregister(sock)
            return
        self._heard.add(rank)
        for event in self._readers[rank].feed(data):
            if isinstance(event, StateChange):
                self._hear_state(rank, event)
            if isinstance(event, Failure) and not event.lost_connection:
                self._cause_is_known = True
            if not isinstance(event, (DeviceSample, HostSample)):
                self._break_silence()
            if isinstance(event, Answered):
                self._read_all_of(rank)
                self._said_before[rank] = self._scene.view.line_count_of(rank)
            self._scene.take(event)

    def _hear_state(self, rank: int, change: StateChange) -> None:
        if change.state == "running":
            self.began = True
        if change.state == "stopping" and self._asking is not None:
            self._asking.come(rank)
        if change.state in OVER:
            self._reported[rank], self._states[rank] = change.time, change.state
            # where all were asked to stop, those that have done so wait for those that still save
            if change.state == "failed" or (change.state == "stopped" and self._asking is None):
                self._fail()

    def _fail(self) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def _read_logs(self) -> None:
        for key, _ in self._logs.select(0):
            self._read_log(*key.data)

    def _read_log(self, rank: int, stream: Stream, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, _READ_AT_ONCE)
        except BlockingIOError:
            return False
        if not data:
            self._logs.unregister(descriptor)
            return False
        self._wrote_last = time.monotonic()
        self._take_output(rank, stream, *self._assemblers[rank, stream].feed(data))
        return True

    def _read_all_of(self, rank: int) -> None:
        """Read what a rank has written until now, which its pipes hold; a line that has not ended ends here."""
        for key in [key for key in self._logs.get_map().values() if key.data[0] == rank]:
            self._read_log(*key.data)
            stream: Stream = key.data[1]
            self._take_output(rank, stream, *self._assemblers[rank, stream].close())

    def _take_output(self, rank: int, stream: Stream, raw: bytes, lines: Sequence[Line]) -> None:
        if raw or lines:
            self._break_silence()
        if raw:
            self._scene.record.output(rank, raw)
        now, apply = time.time(), self._scene.view.apply
        for line in lines:
            apply(LogLine(rank, stream, line.text, now, line.open))

    def _drain(self) -> None:
        """Read what is left; the processes have ended, and one that was not theirs may hold a pipe open."""
        for key in list(self._logs.get_map().values()):
            while self._read_log(*key.data):
                pass
        for (rank, stream), assembler in self._assemblers.items():
            self._take_output(rank, stream, *assembler.close())
        for rank in range(self._plan.size):
            self._hear_events(rank)

    # ----------------------------------------------------------------------------------------------------- judging

    def _all_reported(self) -> bool:
        return len(self._reported) == self._plan.size

    def _has_settled(self) -> bool:
        """Whether a rank has failed, and others have had their time to say why."""
        patience = _SETTLE if self._cause_is_known else _SETTLE_WITHOUT_CAUSE
        return self._failed_at is not None and time.monotonic() - self._failed_at > patience

    def _is_late(self) -> bool:
        return self._scene.deadline is not None and time.monotonic() > self._scene.deadline

    def _endings(self) -> tuple[Ending, ...]:
        return tuple(self._ending(rank) for rank in range(self._plan.size))

    def _ending(self, rank: int) -> Ending:
        outcome = self._outcome(rank)
        if isinstance(outcome, Returned):
            return Ending(rank, value=outcome.value, modules=outcome.modules)
        if isinstance(outcome, Raised):
            return Ending(rank, failure=outcome.failure, error=outcome.error, modules=outcome.modules)
        failure = outcome if outcome is not None else self._death(rank)
        if rank not in self._reported:
            # nobody was left to tell of its end
            state: State = "stopped" if failure.ended_by_us else "failed"
            self._scene.take(StateChange(rank, state, time.time(), failure.message if failure.ended_by_us else ""))
        self._scene.take(failure)
        return Ending(rank, failure=failure)

    def _outcome(self, rank: int) -> Returned | Raised | Failure | None:
        try:
            return read_outcome(self._wires[rank].outcome)
        except Exception as error:  # noqa: BLE001 - unpickling runs anybody's code
            return Failure(
                rank=rank,
                type=type(error).__qualname__,
                message=f"what it brought back can't be unpacked here: {error}",
                traceback="",
                time=time.time(),
            )

    def _was_killed_by_us(self, rank: int, code: int) -> bool:
        return rank in self._killed and code == -signal.SIGKILL

    def _death(self, rank: int) -> Failure:
        code = self._workers.exit_codes().get(rank, -int(signal.SIGKILL))
        mates = self._plan.mates(rank)
        # which of several ranks ended their process is not known
        several = [f"[{mate}] {text}" for mate in mates for text in self._last_words(mate)]
        last = several if len(mates) > 1 else self._last_words(rank)
        by_us = self._was_killed_by_us(rank, code)
        when = self._reported.get(rank, time.time())
        # a process tells of its end where its first rank writes its stacks
        crash = crash_text(self._wires[mates[0]].stacks, self._scene.sources)
        return died(rank, code, last_lines=last, crash=crash, time=when, ended_by_us=by_us)

    def _last_words(self, rank: int) -> list[str]:
        since = self._scene.view.line_count_of(rank) - self._said_before.get(rank, 0)
        return [line.text for line in self._scene.view.tail(rank, min(since, _LAST_LINES))]


def stronger(asked: Stop | None, how: Stop) -> Stop:
    """Of two ways to end a run the one with more force."""
    return how if _FORCE.index(how) > _FORCE.index(asked) else asked or how


def _poke(sock: socket.socket) -> None:
    try:
        sock.send(b"\n")
    except OSError:
        # full, or its reader has gone: either way nobody needs to be woken
        return
