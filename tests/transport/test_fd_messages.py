"""Messages between kernel and supervisor arrive whole, in order, and with their descriptors."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from accelerate_nb.transport.fd_messages import receive_message, send_message


@pytest.fixture
def ends():
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def sent_and_received(ends, messages):
    """What arrives when all is sent from another thread."""
    near, far = ends
    sending = threading.Thread(
        target=lambda: [send_message(near, message, held) for message, held in messages], daemon=True
    )
    sending.start()
    found = [receive_message(far) for _ in messages]
    sending.join()
    return found


def test_messages_come_in_order_however_large(ends):
    messages = [({"number": number, "text": "ü\n" * size}, ()) for number, size in enumerate([0, 1, 500_000, 3])]
    assert [message for message, _ in sent_and_received(ends, messages)] == [message for message, _ in messages]


@pytest.mark.parametrize("count", [0, 1, 3, 253, 254, 700])
def test_descriptors_come_with_their_message_and_stay_open_here(ends, count):
    read, write = os.pipe()
    held = [os.dup(write) for _ in range(count)]
    arrived = []
    try:
        messages = [({"first": 1}, []), ({"do": "x" * 1000}, held), ({"after": 1}, [write])]
        found = sent_and_received(ends, messages)
        arrived = [item for _, descriptors in found for item in descriptors]
        assert [message for message, _ in found] == [message for message, _ in messages]
        assert [len(descriptors) for _, descriptors in found] == [0, count, 1]
        for number in (*held, *arrived):
            assert os.path.sameopenfile(number, write)
        assert not any(os.get_inheritable(number) for number in arrived)
    finally:
        for number in (*held, *arrived, read, write):
            os.close(number)


def test_the_other_side_s_end_is_no_message(ends):
    near, far = ends
    near.close()
    assert receive_message(far) is None


def test_a_message_that_was_cut_off_is_none(ends):
    near, far = ends
    send_message(near, {"whole": True})
    near.sendall(b'\x10\x00\x00\x00\x00\x00\x00\x00{"cut')
    near.close()
    assert receive_message(far) == ({"whole": True}, [])
    assert receive_message(far) is None
