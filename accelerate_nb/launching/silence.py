"""How long nothing has come from any rank, and when that is worth a word."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Silence:
    """
    Begins anew whenever something is heard; is due after `patience` seconds, and then each time that it has doubled.

    >>> silence = Silence(patience=60.0, since=0.0)
    >>> silence.is_due(59.0), silence.is_due(60.0), silence.is_due(61.0), silence.is_due(120.0)
    (False, True, False, True)
    """

    patience: float
    since: float
    _told: float = 0.0

    @property
    def due(self) -> float:
        """When something is to be said, if nothing is heard until then."""
        return self.since + max(self.patience, 2 * self._told) if self.patience else float("inf")

    def is_due(self, now: float) -> bool:
        """Whether something is to be said now; it is then said."""
        if now < self.due:
            return False
        self._told = now - self.since
        return True

    def broken(self, now: float) -> bool:
        """Something was heard; whether the silence had been told of."""
        told, self._told, self.since = self._told > 0, 0.0, now
        return told
