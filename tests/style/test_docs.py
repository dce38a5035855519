"""The documentation is complete: every page can be reached, every public name is documented, no address is invented."""

import re

import yaml
from packaging.version import Version

import accelerate_nb
from tests.style.source_files import ROOT
from tests.style.test_words import tracked

DOCS = ROOT / "docs"
MADE_UP = re.compile(r"github\.com/accelerate-nb|colab\.research\.google\.com/github|kaggle\.com/kernels/welcome")


class Loader(yaml.SafeLoader):
    """YAML with MkDocs' tags for objects, which are not made here."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)
Loader.add_multi_constructor("tag:yaml.org,2002:python/object", lambda loader, suffix, node: suffix)


def config() -> dict:
    return yaml.load((DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def in_navigation(entries: list | dict | str) -> set[str]:
    """The files that a navigation leads to."""
    if isinstance(entries, str):
        return {entries}
    parts = entries.values() if isinstance(entries, dict) else entries
    return {path for part in parts for path in in_navigation(part)}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_page_stands_in_the_navigation() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    # these are made from files outside docs/
    pages |= {"index.md", "changelog.md"}
    pages |= {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert in_navigation(config()["nav"]) == pages


def test_every_public_name_of_the_package_is_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: accelerate_nb\.(\w+)$", text, flags=re.MULTILINE))
    assert set(accelerate_nb.__all__) - {"__version__"} - documented == set()


def test_no_public_address_of_the_repository_is_made_up() -> None:
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in tracked()}
    assert [(path, found) for path, text in texts.items() for found in MADE_UP.findall(text)] == []


def test_the_changelog_has_the_version_of_the_package_as_a_dated_release() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert titles[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(accelerate_nb.__version__)} - \d{{4}}-\d\d-\d\d", titles[1])


def test_what_builds_the_documentation_is_not_needed_by_the_tests() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert re.search(r"^docs = \[", extras, flags=re.MULTILINE)
    for name in re.findall(r"accelerate-nb\[([^\]]*)\]", extras):
        assert "docs" not in name.split(",")


def test_the_packages_of_colab_and_kaggle_are_new_enough() -> None:
    oldest = re.search(r"^OLDEST := (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert oldest is not None
    pins = dict(re.findall(r"(\w+)==([\d.]+)", oldest[1]))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = {name: bound for name, bound in re.findall(r'"(\w+)>=([\d.]+)"', text) if name in pins}
    assert {"ipython", "ipykernel", "ipywidgets"} <= bounds.keys()
    assert {name for name, bound in bounds.items() if Version(pins[name]) < Version(bound)} == set()


FILE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|js|css))`")


def test_every_source_file_that_a_page_names_exists():
    roots = (ROOT, ROOT / "accelerate_nb", ROOT / "tests")
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    named = {(page.name, path) for page in pages for path in FILE.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert sorted(item for item in named if not any((root / item[1]).is_file() for root in roots)) == []
