"""`accelerate-nb runs compare`: what differs between runs is shown, and nothing else."""

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

import pytest

from accelerate_nb.cli.main import main
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.notebook.runs import attach, runs
from accelerate_nb.reports.metric_curves import COLOURS
from tests.reports.kept_run import keep

Compare: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    keep(tmp_path, "slow", 1.0, 0.05)
    keep(tmp_path, "fast", 2.0, 0.1, mixed_precision="bf16")
    return tmp_path


@pytest.fixture
def compare(parent: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    def run_command(*words: str) -> tuple[int, str, str]:
        code = main(["runs", "compare", *words, "--folder", str(parent)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_command


def test_settings_metrics_and_source_that_differ_are_shown(compare: Compare) -> None:
    code, out, _ = compare("slow", "fast")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["mixed_precision", "default", "bf16"] in rows
    # what the function was called with stands with the settings
    assert ["warmup", "1", "2"] in rows
    assert not {"timeout", "epochs"} & {row[0] for row in rows if row}
    assert "warmup = " not in out
    # the mean of both ranks: from 1.05 down to 1.05 - 9 * lr
    assert ["loss", "A", "0.6", "1.05", "0.6"] in rows
    assert ["B", "0.15", "1.05", "0.15", "−0.45", "(−75", "%)"] in rows
    assert "-    lr = 0.05\n+    lr = 0.1\n" in out
    assert " def train():\n" in out
    assert "✔ finished  01:01  2" in out


def test_a_run_goes_by_its_folder_too(compare: Compare, parent: Path) -> None:
    code, out, _ = compare(str(parent / "2024-01-01_000002_fast"), "2024-01-01_000001")
    assert code == 0
    assert out.index("_fast") < out.index("_slow")


def test_cells_that_only_have_other_numbers_are_the_same(compare: Compare, parent: Path) -> None:
    keep(parent, "again", 3.0, 0.05)
    assert "The source of B is that of A." in compare("slow", "again")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slow", "fats"], "There is no run 'fats' among the 2 that are kept. Near to it is fast. "),
        (["slow"], "1 different run was named to be compared. Name 2 to 8 runs."),
        (["slow", "slow"], "1 different run was named to be compared. Name 2 to 8 runs."),
    ],
)
def test_two_different_runs_that_are_known_are_needed(compare: Compare, words: list[str], message: str) -> None:
    code, _, err = compare(*words)
    assert code == 2
    assert message in err


def test_a_page_overlays_the_curves_and_shows_the_diff(compare: Compare, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    code, out, _ = compare("slow", "fast", "--html", str(file))
    page = file.read_text()
    assert (code, out) == (0, f"{file}\n")
    assert page.count("<img") == 1
    assert 'alt="chart of loss up to step 9, 2 runs: min 0.15, max 1.05"' in page
    (source,) = re.findall('src="data:image/svg\\+xml,([^"]*)"', page)
    drawn = unquote(source)
    # a line a run, each in the colour that the legend gives
    for colour in COLOURS[:2]:
        assert f"stroke='{colour}'" in drawn
        assert f'style="color:{colour}"' in page
    assert ">-    lr = 0.05</span>" in page
    # it needs nothing from elsewhere
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_what_has_no_room_is_counted(compare: Compare, parent: Path) -> None:
    names = [f"long_{number}" for number in range(8)]
    for started, name in enumerate(names, 5):
        folder = keep(parent, name, started, started / 10, metrics=[f"group/metric_{number}" for number in range(70)])
        source = "".join(f"    x = '{name} {number}'\n" for number in range(2000))
        (folder / "source.txt").write_text(f"# -------- function: Cell In[1]\n{source}")
    _, out, _ = compare(*names)
    assert "… 10 more metrics not shown here" in out
    # two lines that name the sources, and one that says where in them
    assert out.rstrip().endswith("… 2,003 more lines not shown here")
    compare(*names, "--html", str(parent / "page.html"))
    page = (parent / "page.html").read_text()
    # the names of the columns are a row too, and so is the number of the metrics that have no curve
    rows = page.partition(">difference</th>")[2].partition("</table>")[0].count("<tr>")
    assert f"… {60 * 8 + 1 - rows} more rows not shown here" in page
    diff = page.rpartition("<pre")[2].replace(",", "")
    assert f"… {4003 - diff.count('</span>') - diff.count('<b>')} more lines not shown here" in " ".join(diff.split())


def test_source_in_a_page_is_text(compare: Compare, parent: Path) -> None:
    folder = keep(parent, "evil", 4.0, 0.1)
    (folder / "source.txt").write_text("# -------- function: Cell In[1]\n<script>hacked()</script>\n")
    compare("slow", "evil", "--html", str(parent / "page.html"))
    page = (parent / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;hacked()" in page


def test_a_notebook_compares_the_runs_that_are_named(parent: Path) -> None:
    compared = runs("slow", "fast", folder=parent)
    assert "mixed_precision  default  bf16" in repr(compared)
    assert "2 runs: min 0.15" in compared._repr_html_()
    # a row of the table says the call that shows its run
    calls = re.findall(r"accelerate_nb\.(attach\(.*?\))", html.unescape(runs(folder=parent)._repr_html_()))
    assert [eval(call, {"attach": attach}).name for call in dict.fromkeys(calls)] == ["fast", "slow"]
    # the table of all runs is what a folder alone gives, named or not
    assert len(runs(folder=parent)) == len(runs(parent)) == 2
    with pytest.raises(ConfigurationError, match="There is no run 'fats'"):
        runs("slow", "fats", folder=parent)
