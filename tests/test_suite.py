"""The table of what `make test` leaves out names files that exist."""

from pathlib import Path

from tests.conftest import KEPT_OF

ROOT = Path(__file__).resolve().parents[1]


def test_what_is_left_to_test_all_exists() -> None:
    assert [path for path in KEPT_OF if not (ROOT / path).exists()] == []
