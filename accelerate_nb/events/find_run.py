"""The search for a run that a person names: by its number, its name, its folder, or as the newest."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.events.run_reader import SavedRun, kept_run, kept_runs


def find_run(word: str | os.PathLike[str], parent: Path) -> SavedRun:
    """
    The run that a word means among those whose folders are in `parent`; a path means the run of that folder.

    Raises `ConfigurationError` where it means none, or several.
    """
    text = os.fspath(word)
    if os.sep in text and (by_path := kept_run(Path(text).expanduser().absolute())) is not None:
        return by_path
    every = kept_runs(parent)
    if not every:
        raise ConfigurationError(f"The run {text!r} was requested, but there are no runs in {parent}.")
    chosen = chosen_of(text, every)
    if len(chosen) == 1:
        return chosen[0]
    raise ConfigurationError(_which(text, every, chosen))


def find_runs(words: Sequence[str | os.PathLike[str]], parent: Path, most: int) -> list[SavedRun]:
    """
    The runs that words mean, in their order, to be compared: at least two different ones, at most `most`.

    Raises `ConfigurationError` where a word means none or several, or where there are too few or too many.
    """
    found = {run.folder.resolve(): run for run in (find_run(word, parent) for word in words)}
    if not 2 <= len(found) <= most:
        raise ConfigurationError(
            f"{len(words)} runs were named to be compared, which are {len(found)} different ones. Name 2 to {most} runs."
        )
    return list(found.values())


def chosen_of(word: str, every: Sequence[SavedRun]) -> list[SavedRun]:
    """The runs that a word may mean, of all that there are, newest first; exactly one where it is clear."""
    if word == "last":
        return list(every[:1])
    if word.isdecimal() and 1 <= int(word) <= len(every):
        return [every[int(word) - 1]]
    ways: tuple[Callable[[SavedRun], bool], ...] = (
        lambda item: word == item.folder.name,
        lambda item: word == item.name,
        lambda item: item.folder.name.startswith(word) or item.name.startswith(word),
    )
    return next((found for means in ways if (found := [item for item in every if means(item)])), [])


def _which(word: str, every: Sequence[SavedRun], chosen: Sequence[SavedRun]) -> str:
    """The error text where a word means no run, or several."""
    numbers = {item.folder: number for number, item in enumerate(every, 1)}
    if chosen:
        listed = "\n".join(f"  {numbers[item.folder]:>3}  {item.folder.name}" for item in chosen[:8])
        return f"{word!r} may mean any of {len(chosen)} runs. Name one by its number or its full name:\n{listed}"
    names = [name for item in every for name in (item.folder.name, item.name)]
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    suggestion = f"Near to it {'is' if len(near) == 1 else 'are'} {', '.join(near)}. " if near else ""
    return (
        f"There is no run {word!r} among the {len(every)} that are kept. {suggestion}`accelerate-nb runs` lists them."
    )
