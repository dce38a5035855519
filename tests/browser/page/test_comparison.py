"""The comparison of runs in a page, in either colour scheme and by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.cli.main import main
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
def test_curves_lie_over_each_other_and_axe_finds_nothing(chromium: Any, file: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed").Axe()
    page = chromium.new_page(offline=True, color_scheme=scheme, viewport={"width": 1400, "height": 1000})
    page.goto(file.as_uri())
    chart = page.get_by_role("img", name="chart of loss up to step 9, 2 runs")
    assert chart.evaluate("async chart => { await chart.decode(); return chart.naturalWidth }") > 0
    expect(page.get_by_role("cell", name="bf16")).to_be_visible()
    expect(page.get_by_text("+    lr = 0.1")).to_be_visible()
    found = axe.run(page)["violations"]
    assert [(item["id"], [node["html"] for node in item["nodes"]][:3]) for item in found] == []
    page.close()
