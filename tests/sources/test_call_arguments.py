"""The arguments of a launch as text: named, bounded, without secrets, and without a device being woken."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from accelerate_nb.sources.run_source import _VALUES, call_lines, values_of, word_lines


def train(lr: float, *sizes: int, epochs: int = 3, api_token: str = "", **options: Any) -> None:
    """Does nothing."""


class Opaque:
    """Has a text that must not be asked for."""

    def __repr__(self) -> str:
        raise AssertionError("this may be long, or wake a device")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("arrays compare each element, and refuse other shapes")

    __hash__ = None  # type: ignore[assignment]  # as arrays are


def test_arguments_have_their_parameters_names_and_defaults_are_among_them() -> None:
    lines = call_lines(partial(train, 0.1, mode="fast"), (8, 16))
    assert values_of(lines) == {
        "lr": "0.1",
        "sizes": "(8, 16)",
        "epochs": "3",
        "api_token": "(not kept)",
        "mode": "'fast'",
    }


def test_of_other_than_plain_values_the_type_is_kept() -> None:
    assert call_lines(lambda model: None, (Opaque(),)) == "model = <Opaque>\n"
    lines = call_lines(train, ({"model": Opaque(), "optimizer": Opaque, "where": Path("data"), "on": True, "x": None},))
    assert values_of(lines)["lr"] == (
        "{'model': <Opaque>, 'on': True, 'optimizer': <Opaque>, 'where': PosixPath('data'), 'x': None}"
    )


def test_values_are_bounded_and_on_one_line() -> None:
    lines = call_lines(train, ("a\nb" * 10_000, *range(10_000)))
    assert len(lines.splitlines()) == 4
    assert len(lines) < 1000


def test_large_arguments_cost_a_launch_nothing() -> None:
    class Vocabulary(dict):  # type: ignore[type-arg]
        """Counts the entries that were looked at."""

        looked_at = 0

        def items(self) -> Any:
            for entry in super().items():
                self.looked_at += 1
                yield entry

    vocabulary = Vocabulary((str(number), number) for number in range(10_000))
    assert _VALUES.repr_dict(vocabulary, 1).endswith("...}")
    assert vocabulary.looked_at < 100
    assert values_of(call_lines(train, ({str(number) for number in range(10_000)},)))["lr"].endswith("...}")
    # Python writes no integer of more than 4,300 digits
    assert values_of(call_lines(train, (10**5000,)))["lr"] == "<int>"


def test_secrets_are_not_kept() -> None:
    lines = call_lines(train, ({"password": "1234", "size": 3},)) + word_lines(
        ["--hub_token", "1234", "--api-key=1234"]
    )
    assert "1234" not in lines
    assert lines.count("(not kept)") == 4  # api_token, too


def test_a_call_that_does_not_fit_is_kept_as_it_is() -> None:
    assert call_lines(lambda: None, (1,)) == "args[0] = 1\n"


def test_words_of_a_command_line_are_under_their_options() -> None:
    assert word_lines(["data", "--lr", "0.1", "--size=3", "--verbose", "-n", "1", "2"]) == (
        "words = data\n--lr = 0.1\n--size = 3\n--verbose = yes\n-n = 1 2\n"
    )
