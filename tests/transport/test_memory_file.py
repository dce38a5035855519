"""Entries lie in a file where they can be mapped and used, and one process's writes are its own."""

import os

import numpy as np
import pytest

from accelerate_nb.transport.memory_file import map_entries, memory_file, read_entries, write_entries

ENTRIES = [b"", b"x", bytearray(b"0123456789" * 1000), memoryview(np.arange(1000.0)), b"", b"end"]


@pytest.fixture
def file():
    descriptor = memory_file("test")
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("read", [map_entries, read_entries])
@pytest.mark.parametrize("entries", [ENTRIES, [b""], [b"only"]], ids=["many", "one empty", "one"])
def test_entries_come_back_as_they_were(file, read, entries):
    write_entries(file, entries)
    assert [bytes(entry) for entry in read(file)] == [bytes(entry) for entry in entries]


def test_entries_begin_where_vectors_may(file):
    write_entries(file, ENTRIES)
    for entry in map_entries(file):
        if len(entry):
            assert np.frombuffer(entry, dtype=np.uint8).ctypes.data % 64 == 0


def test_a_write_to_mapped_memory_changes_no_other_view_and_not_the_file(file):
    write_entries(file, [b"0" * 10_000])
    (mine,), (other,) = map_entries(file), map_entries(file)
    mine[:4] = b"1111"
    assert bytes(other[:4]) == b"0000"
    assert bytes(read_entries(file)[0][:4]) == b"0000"


def test_a_file_that_was_never_or_not_wholly_written_has_no_entries(file):
    assert read_entries(file) == []
    assert map_entries(file) == []
    write_entries(file, [b"data"])
    os.pwrite(file, bytes(8), 0)
    assert read_entries(file) == []


def test_a_second_writing_after_truncation_is_what_counts(file):
    write_entries(file, [b"x" * 100_000, b"y"])
    os.ftruncate(file, 0)
    write_entries(file, [b"short"])
    assert read_entries(file) == [b"short"]
