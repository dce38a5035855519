"""A listener to what this process's rank sends."""

from collections.abc import Iterator

import pytest

from accelerate_nb.rank.event_sink import connect
from tests.runtime.listener import Listener


@pytest.fixture
def listener() -> Iterator[Listener]:
    recorder = Listener()
    connect(recorder)
    yield recorder
    connect(None)
