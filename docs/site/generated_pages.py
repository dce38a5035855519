"""MkDocs' hook for pages that are made from the README, the changelog, the notebooks and the package's settings."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import DictLoader
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
# `make docs` executes the notebooks into this folder; one that is missing there is shown without outputs.
EXECUTED = ROOT / "build" / "notebooks"

sys.path.insert(0, str(ROOT))
from accelerate_nb.config.run_config import grouped  # noqa: E402
from accelerate_nb.config.settings import GROUPS, Setting  # noqa: E402 - of this checkout, installed or not

# Files outside docs/ that are pages of the site.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "LICENSE": "LICENSE.txt"}
LINK = re.compile(r"(\]\()([^()\s#:]+)(#[^()\s]*)?(\))")
DRAWING = re.compile(r"!\[([^\]]*)\]\((pictures/\w+\.svg)\)")
SETTINGS = "<!-- settings -->"
NOT_EXECUTED = "\n!!! note\n    This page was built without executing the notebook, so the outputs are missing.\n"

TEMPLATE = """
{%- extends 'markdown/index.md.j2' -%}
{%- macro text(value) %}
~~~~ { .text .output }
{{ value | strip_ansi }}
~~~~
{% endmacro -%}
{%- block stream %}{{ text(output.text) }}{% endblock stream -%}
{%- block data_text %}{{ text(output.data['text/plain']) }}{% endblock data_text -%}
{%- block error %}{{ text(output.traceback | join('\n')) }}{% endblock error -%}
{%- block data_html %}
<div class="output">
{{ output.data['text/html'] }}
</div>
{% endblock data_html -%}
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file in docs/."""
    for source, page in PAGES.items():
        files.append(
            File.generated(config, page, content=_with_site_links((ROOT / source).read_text("utf-8"), source, page))
        )
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for file in _notebook(path, config):
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put in what is made at build time: links to generated pages, drawings, and the tables of settings."""
    if page.file.generated_by is not None:
        return markdown
    uri = page.file.src_uri
    text = _with_site_links(markdown, f"docs/{uri}", uri)
    text = DRAWING.sub(lambda found: _drawing(found[1], (ROOT / "docs" / uri).parent / found[2]), text)
    return text.replace(SETTINGS, _settings())


def _with_site_links(markdown: str, source: str, page: str) -> str:
    """The text of a file of the repository with its relative links as they are on a page of the site."""

    def moved(found: re.Match[str]) -> str:
        aim = os.path.relpath((ROOT / source).parent / found[2], ROOT)
        return f"{found[1]}{os.path.relpath(_page(aim), os.path.dirname(page))}{found[3] or ''}{found[4]}"

    return LINK.sub(moved, markdown)


def _page(path: str) -> str:
    """Where a file of the repository is found on the site."""
    if path in PAGES:
        return PAGES[path]
    return re.sub(r"^(notebooks/\w+)\.ipynb$", r"\1.md", path.removeprefix("docs/"))


def _notebook(path: Path, config: MkDocsConfig) -> Iterator[File]:
    """A notebook's page and its pictures, from the executed copy where there is one."""
    executed = EXECUTED / path.name
    notebook = nbformat.read(executed if executed.exists() else path, as_version=4)
    exporter = MarkdownExporter(template_file="page.md.j2", extra_loaders=[DictLoader({"page.md.j2": TEMPLATE})])
    exporter.register_preprocessor(CoalesceStreamsPreprocessor(enabled=True))
    pictures = {"output_files_dir": ".", "unique_key": path.stem}
    markdown, resources = exporter.from_notebook_node(notebook, resources=pictures)
    if not executed.exists():
        markdown = markdown.replace("\n", NOT_EXECUTED, 1)
    uri = f"notebooks/{path.stem}.md"
    yield File.generated(config, uri, content=_with_site_links(markdown, f"notebooks/{path.name}", uri))
    for name, picture in resources["outputs"].items():
        yield File.generated(config, f"notebooks/{os.path.normpath(name)}", content=picture)


def _drawing(title: str, path: Path) -> str:
    """A drawing as a part of its page, where it has the colours of the page's theme."""
    return f'<figure class="drawing" role="img" aria-label="{title}">\n{path.read_text("utf-8").strip()}\n</figure>'


def _settings() -> str:
    """A table of settings for each heading, as the command line and the form show them."""
    parts = []
    for group, settings in grouped().items():
        parts.append(f"### {GROUPS[group]}\n\n| Setting | Default | |\n|---|---|---|")
        parts[-1] += "".join(f"\n| `{setting.name}` | {_default(setting)} | {_help(setting)} |" for setting in settings)
    return "\n\n".join(parts)


def _default(setting: Setting) -> str:
    return "" if setting.default in (None, "") else f"`{setting.default}`"


def _help(setting: Setting) -> str:
    """Its help, its values, and its further names in the environment and in a file."""
    parts = [setting.help]
    if setting.choices:
        parts.append("One of " + ", ".join(f"`{choice}`" for choice in setting.choices) + ".")
    if also := (*setting.variables[1:], *setting.keys[1:]):
        parts.append("Also " + ", ".join(f"`{name}`" for name in also) + ".")
    return " ".join(parts).replace("|", "\\|")
