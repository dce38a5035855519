"""The comparison of runs in a page, in either colour scheme and by keyboard."""

from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.cli.main import main
from accelerate_nb.notebook.display.message_feed import MOST_POINTS, series_rows
from accelerate_nb.notebook.runs import runs
from tests.reports.kept_run import keep

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The page that the command line writes of two runs."""
    keep(tmp_path, "slow", 1.0, 0.05)
    keep(tmp_path, "fast", 2.0, 0.1, mixed_precision="bf16")
    file = tmp_path / "compare.html"
    assert main(["runs", "compare", "slow", "fast", "--folder", str(tmp_path), "--html", str(file)]) == 0
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_lie_over_each_other_and_axe_finds_nothing(
    chromium: Any, violations: Any, file: Path, scheme: str
) -> None:
    page = chromium.new_page(offline=True, color_scheme=scheme, viewport={"width": 1400, "height": 1000})
    page.goto(file.as_uri())
    chart = page.get_by_role("img", name="chart of loss up to step 9, 2 runs")
    assert chart.evaluate("async chart => { await chart.decode(); return chart.naturalWidth }") > 0
    expect(page.get_by_role("cell", name="bf16")).to_be_visible()
    expect(page.get_by_text("+    lr = 0.1")).to_be_visible()
    assert violations(page) == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_notebook_the_curves_are_the_panels_charts(
    page: Any, violations: Any, tmp_path: Path, file: Path, scheme: str
) -> None:
    shown = runs("slow", "fast", folder=tmp_path)
    message = {"names": [*shown.comparison.labels], "metrics": [*series_rows(shown.comparison.overlay, MOST_POINTS)]}
    page.evaluate(
        """([html, message, light]) => {
          theme(light);
          document.getElementById("here").innerHTML = html;
          const traits = { charts: document.querySelector("[id^=accelerate-nb-runs]").id, message, _css: "" };
          comparison.default().initialize({ model: { get: (name) => traits[name] } });
        }""",
        [shown._repr_html_(), message, scheme == "light"],
    )
    expect(page.locator(".anb")).to_have_attribute("data-anb-theme", scheme)
    expect(page.locator("img")).to_be_hidden()
    chart = page.get_by_role("img", name="loss: min 0.1500, max 1.050, last A 0.6000, B 0.1500")
    chart.focus()
    page.keyboard.press("Home")
    expect(page.get_by_role("status")).to_have_text("loss, step 0: A 1.050, B 1.050")
    expect(page.locator(".anb-tip-row")).to_have_text(["A1.050", "B1.050"])
    expect(page.get_by_role("button", name="Band")).to_be_hidden()
    assert violations(page, ".anb") == []
