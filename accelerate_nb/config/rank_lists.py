"""Ranks as text."""

from collections.abc import Callable, Collection, Iterable


def spans(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Ranks that follow each other as one: the first and the last of each row of them."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


def named(ranks: Iterable[int]) -> str:
    """Ranks as a person types them: `0,2-3`, which `ranks_of` reads."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans(ranks))


def listed(ranks: Iterable[int]) -> str:
    """Every one of the ranks: `0, 2, 3`."""
    return ", ".join(map(str, ranks))


def of_ranks(ranks: Collection[int], write: Callable[[Collection[int]], str] = named) -> str:
    """Ranks in a sentence, in the order in which they are given: `rank 2`, `ranks 0-2`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {write(ranks)}"
