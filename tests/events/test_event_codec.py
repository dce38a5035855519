"""Events arrive whole and in order, however a stream cuts them."""

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from accelerate_nb.events.event_codec import EventReader, EventSender, to_line
from accelerate_nb.events.event_types import Display, LogLine, Metric, StateChange

EVENTS = [
    StateChange(0, "running", 1.0, "42"),
    Metric(1, "loss", 0.5, None, 2.0),
    Display(0, {"text/html": "<b>ü\n</b>", "image/png": "x" * 5000}, {"image/png": {"width": 3}}, 3.0),
    LogLine(2, "stderr", "a\r\nb \udcff", 4.0, True),
]


def test_events_come_out_as_they_went_in_however_they_are_cut():
    data = b"".join(map(to_line, EVENTS))
    for seed in range(50):
        dice, reader, found, rest = random.Random(seed), EventReader(), [], data
        assert list(EventReader().feed(data[: data.index(b"\n")])) == []
        while rest:
            size = dice.choice([1, 7, 100, 5000])
            found += reader.feed(rest[:size])
            rest = rest[size:]
        assert found == EVENTS


def test_threads_that_send_at_once_don_t_mix_their_events():
    near, far = socket.socketpair()
    found = []

    def read():
        reader = EventReader()
        while data := near.recv(1 << 16):
            found.extend(reader.feed(data))

    with near:
        reading = threading.Thread(target=read)
        reading.start()
        with far:
            sender = EventSender(far, rank=0)
            events = [[Metric(thread, "x" * 3000, float(i), i, 0.0) for i in range(100)] for thread in range(4)]
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda of_thread: [*map(sender.send, of_thread)], events))
        reading.join()
    for thread, thread_events in enumerate(events):
        assert [event for event in found if event.rank == thread] == thread_events


def test_where_nobody_listens_any_more_events_are_dropped():
    near, far = socket.socketpair()
    near.close()
    with far:
        EventSender(far, rank=0).send(EVENTS[0])


def test_a_very_large_event_costs_no_more_than_its_size():
    line = to_line(Display(0, {"image/png": "x" * 30_000_000}, {}, 0.0))
    reader, found = EventReader(), []
    begin = time.thread_time()
    for start in range(0, len(line), 20_000):
        found += reader.feed(line[start : start + 20_000])
    # when the rest is put together anew for each piece, this takes many seconds
    assert time.thread_time() - begin < 3
    assert len(found[0].data["image/png"]) == 30_000_000


def test_an_event_that_an_interrupt_cuts_off_spoils_no_other():
    sock = Mock(**{"sendall.side_effect": [KeyboardInterrupt, None, None]})
    sender = EventSender(sock, rank=0)
    with pytest.raises(KeyboardInterrupt):
        sender.send(EVENTS[1])
    sender.send(EVENTS[0])
    cut_off, *others = [call.args[0] for call in sock.sendall.call_args_list]
    assert list(EventReader().feed(b"".join([cut_off[:9], *others]))) == EVENTS[:1]


def test_what_is_sent_in_the_midst_of_sending_waits_for_nobody_and_comes_after():
    sock = Mock()
    sender = EventSender(sock, rank=0)
    # a finalizer sends meanwhile, as that of a progress bar does
    sock.sendall.side_effect = lambda line: sender.send(EVENTS[1]) if line == to_line(EVENTS[0]) else None
    sending = threading.Thread(target=sender.send, args=(EVENTS[0],), daemon=True)
    sending.start()
    sending.join(20)
    assert [call.args[0] for call in sock.sendall.call_args_list] == [to_line(item) for item in EVENTS[:2]]
