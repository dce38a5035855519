"""Bruck's all-gather of small rows of bytes, as messages between the processes' hosts."""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.rank_local import RankLocal
from accelerate_nb.runtime.operations.peer_messages import HEAD, GlooMessages, Listener, SocketMessages, Step
from accelerate_nb.runtime.world.world import World

# A row's head begins with the call's signature and the length of the payload.
SIGNATURE = 16
_CAPACITY = 512 << 10
_PAGE, _REMEMBERED = 256, 8
_MOST_VIEWS = 64
_CPU = torch.device("cpu")


class BruckExchange:
    """
    The exchange of a small row from each process, in ⌈log2 processes⌉ steps on all of them.

    In the step of distance d a process sends the rows that it has to the process d before it, and receives as many from the
    process d after it. Row i is in the end that of the process i after this one (Bruck et al., "Efficient algorithms for
    all-to-all communications", 1997). With a source, its row alone is passed on, and of the others the heads.

    Processes that make different calls send rows of different lengths. Every message is received with room for the longest of
    any call, and begins with its sender's head, which is compared with this process's own. Who has seen a difference sends a
    head of zeros from then on. In the end every process has received something from all others, if not directly, then through
    processes that have compared theirs: so all come to the same verdict.
    """

    def __init__(self, world: World, group: Callable[[], Any]) -> None:
        self.rank, self.size, self.group = world.rank, world.size, group
        self.capacity = max(_CAPACITY, 2 * HEAD * self.size)
        self._disagreement = 2 * self.capacity
        # a tensor made in inference mode could not be written outside of it
        with torch.inference_mode(False):
            self.memory = torch.empty(2 * self.capacity + HEAD, dtype=torch.uint8, device=_CPU)
        self.bytes = self.memory.numpy().data
        self.bytes[self._disagreement :] = bytes(HEAD)
        self.stride, self.source_row = HEAD, 0
        # the check that was begun last and is not finished
        self.unfinished: Any = None
        self._distance = self.size
        self._recent = deque([min(_PAGE, self.longest())], maxlen=_REMEMBERED)
        self._views: dict[Any, Tensor] = {}
        distances = [1 << power for power in range((self.size - 1).bit_length())]
        self._steps = {
            distance: Step(to=(self.rank - distance) % self.size, source=(self.rank + distance) % self.size)
            for distance in distances
        }
        self._messages: GlooMessages | SocketMessages = GlooMessages(self.memory, self.capacity, group)
        self._messages = self._over_sockets() or self._messages

    def longest(self, source: int | None = None) -> int:
        """The length of the longest rows."""
        return self.capacity // (self.size if source is None else 2) // HEAD * HEAD

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all processes are on this machine and connected by sockets."""
        return isinstance(self._messages, SocketMessages)

    @property
    def recent_length(self) -> int:
        """The length of rows whose payloads differ in length: as long as the longest of the last exchanges."""
        return max(self._recent)

    def open(self, stride: int) -> None:
        """Begin an exchange of rows of this length; the first of them is written next, behind its head."""
        self.stride = stride

    def rows(self, offset: int, part: Tensor) -> Tensor:
        """What stands at an offset of each row, as tensors of a part's shape and type: a view of `(rows, *part.shape)`."""
        key = (self.stride, offset, part.dtype, part.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            count = min(max(2, self.size), self.memory.numel() // self.stride)
            with torch.inference_mode(False):
                rows = self.memory[: count * self.stride].view(count, self.stride)[:, offset : offset + part.nbytes]
                view = self._views[key] = rows.view(part.dtype).view(count, *part.shape)
        return view

    def row(self, rank: int) -> Tensor:
        """The row of one process."""
        start = (rank - self.rank) % self.size * self.stride
        return self.memory[start : start + self.stride]

    def send(self, head: bytes, source: int | None = None) -> None:
        """Send this process's row to the first other, with the bytes that its head begins with."""
        self.bytes[: len(head)] = head
        self._distance, self._agrees = 1, True
        self._source = None if source is None else (source - self.rank) % self.size
        self.source_row = 1 if self._source else 0
        self._start_step()

    def receive(self) -> bool:
        """Wait until the rows of all processes have come: whether all heads have the same signature."""
        while self._distance < self.size:
            self._messages.finish()
            self._agrees &= self.bytes[self._into : self._into + SIGNATURE] == self.bytes[:SIGNATURE]
            self._distance *= 2
            self._start_step()
        return self._agrees

    def lengths(self) -> list[int]:
        """The lengths of all processes' payloads, which the next rows have room for."""
        starts = [(rank - self.rank) % self.size * self.stride for rank in range(self.size)]
        lengths = [struct.unpack_from("<q", self.bytes, start + SIGNATURE)[0] for start in starts]
        wanted = -(-(HEAD + max(lengths)) // _PAGE) * _PAGE
        self._recent.append(wanted if wanted <= self.longest() else min(_PAGE, self.longest()))
        return lengths

    def fill(self, rows: Tensor) -> None:
        """Have large rows of one length arrive around this process's, on one machine."""
        assert isinstance(self._messages, SocketMessages)
        parts = [row.numpy().data for row in rows]
        for distance, step in self._steps.items():
            for number in range(self.rank, self.rank + min(distance, self.size - distance)):
                self._messages.transfer(step, parts[number % self.size], parts[(number + distance) % self.size])

    def swap(self, sent: Tensor, received: Tensor) -> None:
        """Have two processes of one machine receive each other's large data."""
        assert isinstance(self._messages, SocketMessages)
        self._messages.transfer(self._steps[1], sent.numpy().data, received.numpy().data)

    def broadcast(self, row: Tensor, source: int) -> None:
        """Have one process's large row written over those of the others, on one machine."""
        assert isinstance(self._messages, SocketMessages)
        part, nothing = row.numpy().data, memoryview(b"")
        relative = (source - self.rank) % self.size
        for distance, step in self._steps.items():
            count = min(distance, self.size - distance)
            is_received = distance <= relative < distance + count
            self._messages.transfer(step, part if relative < count else nothing, part if is_received else nothing)

    def _start_step(self) -> None:
        distance, stride, source = self._distance, self.stride, self._source
        if distance >= self.size:
            return
        count = min(distance, self.size - distance)
        if source is None:
            start, end, self._into = 0, count * stride, distance * stride
        else:
            # its row comes once, and stands behind this process's own; the heads that come later stand behind both
            start, end = (self.source_row * stride, (self.source_row + 1) * stride) if source < count else (0, HEAD)
            self._into = stride if source >= distance else 2 * stride
        if not self._agrees:
            start, end = self._disagreement, self._disagreement + HEAD
        self._messages.start(self._steps[distance], start, end, self._into)

    def _over_sockets(self) -> SocketMessages | None:
        """Messages over sockets, where all processes are on this machine and have connected."""
        listener = Listener()
        end = HEAD + len(listener.address)
        self.open(end)
        self.bytes[HEAD:end] = listener.address
        self.send(b"address".ljust(SIGNATURE))
        self.receive()
        addresses = [self.row(rank)[HEAD:end].numpy().tobytes() for rank in range(self.size)]
        sockets = listener.connect(self.rank, list(self._steps.values()), addresses)
        self.open(HEAD)
        self.send((b"apart" if sockets is None else b"connected").ljust(SIGNATURE))
        if not self.receive() or sockets is None:
            return None
        return SocketMessages(self.bytes, self.capacity, sockets, self.group().options._timeout)


# by group, not by world: a process that discovers its world again finds the same group, unlike the others' worlds
_exchanges: RankLocal[WeakKeyDictionary[Any, BruckExchange]] = RankLocal(WeakKeyDictionary)


def exchange_of(world: World) -> BruckExchange:
    """The exchange among the hosts of these processes."""
    group = world.exchange_world.group
    exchanges = _exchanges.get()
    exchange = exchanges.get(group)
    if exchange is None:
        exchange = exchanges[group] = BruckExchange(
            world, _gloo_of(group) if _talks_over_gloo(group) else _beside(world)
        )
    return exchange


def _gloo_of(group: Any) -> Callable[[], Any]:
    # not kept: what is held here would not end where its connection is released
    reference = weakref.ref(group)

    def gloo() -> Any:
        group = reference()
        return group._get_backend(_CPU) if isinstance(group, dist.ProcessGroup) else group

    return gloo


def _talks_over_gloo(group: Any) -> bool:
    return not isinstance(group, dist.ProcessGroup) or "cpu:gloo" in str(dist.get_backend_config(group))


def _beside(world: World) -> Callable[[], Any]:
    """A gloo group of the same processes: a check over their devices would have the hosts wait for what these compute."""
    timeout = world.group._get_backend(world.device).options._timeout
    # torch's stubs don't know its arguments
    gloo: Any = dist.ProcessGroupGloo
    # ranks along an axis of a mesh have a group of their own, and so have those along another
    store = dist.PrefixStore(f"accelerate_nb/calls/{world.group.group_name}", world.store)
    group = gloo(store, world.rank, world.size, timeout)
    return lambda: group
