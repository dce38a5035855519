"""A listener to what this process's rank sends."""

from collections.abc import Iterator
from typing import Any

import pytest

from accelerate_nb.events.event_types import Metric
from accelerate_nb.rank.event_sink import connect


class Listener:
    """Keeps the events that are sent to it."""

    rank = 0

    def __init__(self) -> None:
        self.events: list[Any] = []

    def send(self, event: Any) -> None:
        self.events.append(event)

    def of(self, event_class: type[Any]) -> list[Any]:
        """The events of a class."""
        return [event for event in self.events if isinstance(event, event_class)]

    def values(self, name: str) -> list[float]:
        """The values of a metric."""
        return [event.value for event in self.of(Metric) if event.name == name]


@pytest.fixture
def listener() -> Iterator[Listener]:
    recorder = Listener()
    connect(recorder)
    yield recorder
    connect(None)
