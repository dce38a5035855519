"""What the project's texts say: links lead somewhere, and the project speaks of itself alone."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.style.source_files import ROOT

PATTERNS = ("*.md", "docs/**/*.md", "notebooks/*.ipynb")
PAGES = [page for pattern in PATTERNS for page in ROOT.glob(pattern) if page.exists()]
LINK = re.compile(r"!?\[[^\]\[]*\]\(([^()\s]+)\)")
# With brackets around a letter, so that this file does not find itself.
OUTSIDE = re.compile(r"(?<![\w.])/wor[k]/|\bissue \d|\bissues? #\d|/tmp/commo[n]")


def links(page: Path) -> list[str]:
    """The targets of a page's links, without those of code blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make, spelled as GitHub does."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def dead(page: Path, target: str) -> bool:
    """Whether a link of a page leads nowhere."""
    path, _, anchor = target.partition("#")
    aim = page if not path else page.parent / path
    return not aim.exists() or bool(anchor and aim.suffix == ".md" and anchor not in anchors(aim))


def test_no_link_is_dead() -> None:
    found = [f"{page.relative_to(ROOT)}: {target}" for page in PAGES for target in links(page) if dead(page, target)]
    assert found == []


def tracked() -> list[Path]:
    """Every file of the repository that is text."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: an unpacked archive has no list of its files")
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True, timeout=60)
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_the_project_speaks_of_itself_alone() -> None:
    lines = [
        (path, number, line)
        for path in tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    ]
    assert [where for *where, line in lines if OUTSIDE.search(line)] == []


# Riddles and participles that have a plain word of the field: `reported`, `requested`, `set`, `sent`, `printed`.
RIDDLES = (
    "told|said|asked|heard|tells?|says?|hears?|asks?|wish(es)?|seats?|culprits?|blamed?|patience|silence|surroundings?"
)
PROMISE = re.compile(rf"^ *(?:async )?def test_(?:\w+_)?(?:{RIDDLES})(?:_\w+)?\(", re.MULTILINE)


def test_names_of_tests_use_the_words_of_the_field() -> None:
    found = {
        str(path.relative_to(ROOT)): [match.group().strip() for match in PROMISE.finditer(path.read_text())]
        for path in sorted(ROOT.glob("tests/**/*.py"))
    }
    assert {name: tests for name, tests in found.items() if tests} == {}
