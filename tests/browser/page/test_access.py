"""The panel by keyboard, by screen reader, in either theme and in little room."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.page.feeds import STACKS, failed, running

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

SCENES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "running": lambda: running(8),
    "failed": lambda: failed(4),
    "many": lambda: [*running(64), {"seq": 3, "nodes": [[i, f"node {i} · n{i}", 8 * i, 8 * i + 7] for i in range(8)]}],
    "stacks": lambda: [
        *running(3),
        {"seq": 3, "stacks": {"text": STACKS}, "idle_warning": {"seconds": 70, "text": "Rank 1 is elsewhere."}},
    ],
}


@pytest.mark.parametrize("light", [True, False], ids=["light", "dark"])
@pytest.mark.parametrize("scene", SCENES)
def test_axe_finds_nothing(page: Any, show: Any, violations: Any, scene: str, light: bool) -> None:
    page.evaluate("(light) => theme(light)", light)
    show(SCENES[scene]())
    expect(page.locator(".anb")).to_have_attribute("data-anb-theme", "light" if light else "dark")
    page.wait_for_function("document.querySelectorAll('.anb-chart').length === 4")
    page.get_by_role("button", name="Times").click()
    page.get_by_label("search in the output").fill("loss")
    assert violations(page, ".anb") == []


def test_axe_finds_nothing_side_by_side(page: Any, show: Any, violations: Any) -> None:
    show(running(4))
    page.get_by_role("button", name="Side by side").click()
    page.get_by_role("button", name="Table").click()
    assert violations(page, ".anb") == []


def test_arrows_walk_through_the_tabs(page: Any, show: Any) -> None:
    show(running(3))
    tabs = page.get_by_role("tab")
    tabs.first.focus()
    for key, name in [
        ("ArrowRight", "rank 0"),
        ("End", "rank 2"),
        ("ArrowRight", "all ranks"),
        ("ArrowLeft", "rank 2"),
        ("Home", "all ranks"),
    ]:
        page.keyboard.press(key)
        expect(page.get_by_role("tab", name=name)).to_be_focused()
        expect(page.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")
    assert tabs.evaluate_all("(tabs) => tabs.filter((tab) => tab.tabIndex === 0).length") == 1


def test_every_control_is_reached_by_tab_and_shows_it(page: Any, show: Any) -> None:
    show(running(2))
    page.wait_for_function("document.querySelectorAll('.anb-chart').length === 4")
    names = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "() => { const e = document.activeElement; return e.closest('.anb') && [e.getAttribute('aria-label') || e.textContent || e.placeholder,"
            " getComputedStyle(e).outlineStyle]; }"
        )
        if name:
            names.append(name[0])
            assert name[1] == "solid", name
    # and it leads out again
    assert len(names) < 60
    for wanted in ("Stacks", "Stop", "Ranks", "rank 0: show its output", "Metrics", "Band", "Table", "loss: logarithmic scale",
                   "Output", "all ranks", "search in the output", "Only matches", "Times", "Side by side", "Follow", "Copy"):  # fmt: skip
        assert wanted in names, wanted
    assert any(name.startswith("loss: min") for name in names)
    assert "output of all ranks" in names


def test_arrows_read_a_chart_step_by_step(page: Any, show: Any) -> None:
    show([running(1)[0], {"seq": 2, "metrics": [["loss", 0, [[i, 10.0 - i, 0] for i in range(5)]]]}])
    plot = page.locator(".anb-plot")
    plot.focus()
    live = page.locator(".anb > .anb-inner > [role=status]")
    for key, text in [
        ("Home", "loss, step 0: rank 0 10"),
        ("ArrowRight", "loss, step 1: rank 0 9"),
        ("End", "loss, step 4: rank 0 6"),
        ("ArrowLeft", "loss, step 3: rank 0 7"),
    ]:
        page.keyboard.press(key)
        expect(live).to_have_text(text)
    expect(page.locator(".anb-tip")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".anb-tip")).to_be_hidden()
    expect(plot).to_be_focused()


def test_keys_are_the_panels_own_and_escape_gives_them_back(page: Any, show: Any) -> None:
    show(running(2))
    page.evaluate("() => { window.keys = []; document.addEventListener('keydown', (event) => keys.push(event.key)); }")
    assert page.locator(".anb").get_attribute("data-lm-suppress-shortcuts") == "true"
    search = page.get_by_label("search in the output")
    search.focus()
    page.keyboard.type("dd")
    page.keyboard.press("Escape")
    expect(search).to_have_value("")
    page.keyboard.press("Escape")
    expect(page.get_by_role("log", name="output of all ranks")).to_be_focused()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "jp-Notebook"
    assert page.evaluate("keys") == []


def test_sections_fold(page: Any, show: Any) -> None:
    show(running(2))
    fold = page.get_by_role("button", name="Ranks", exact=True)
    fold.press("Enter")
    expect(fold).to_have_attribute("aria-expanded", "false")
    expect(page.locator(".anb-table").first).to_be_hidden()
    fold.press("Enter")
    expect(page.locator(".anb-table").first).to_be_visible()


@pytest.mark.parametrize("width", [500, 360, 900])
@pytest.mark.parametrize("scene", SCENES)
def test_little_room_is_enough(page: Any, show: Any, scene: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    show(SCENES[scene]())
    page.wait_for_function("document.querySelectorAll('.anb-chart').length === 4")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    over = page.evaluate(
        "() => { const right = document.querySelector('.anb').getBoundingClientRect().right + 1;"
        " return [...document.querySelectorAll('.anb button, .anb input, .anb-chip, .anb-bar, .anb-meter, .anb-chart')]"
        " .filter((e) => e.offsetParent && e.getBoundingClientRect().right > right).map((e) => e.outerHTML.slice(0, 90)); }"
    )
    assert over == []
    page.get_by_role("button", name="Side by side").click()
    boxes = page.locator(".anb-side-box").evaluate_all("(boxes) => new Set(boxes.map((box) => box.offsetLeft)).size")
    assert boxes == (1 if width <= 500 else 2)


def test_without_a_notebooks_theme_the_systems_is_followed(page: Any, show: Any) -> None:
    page.evaluate("() => delete document.body.dataset.jpThemeLight")
    page.emulate_media(color_scheme="dark")
    show(running(1))
    expect(page.locator(".anb")).to_have_attribute("data-anb-theme", "dark")
    page.emulate_media(color_scheme="light")
    expect(page.locator(".anb")).to_have_attribute("data-anb-theme", "light")


def test_nothing_moves_by_itself(page: Any, show: Any) -> None:
    show(failed(2))
    moving = page.evaluate(
        "() => [...document.querySelectorAll('.anb, .anb *')].filter((e) => { const s = getComputedStyle(e);"
        " return s.transitionDuration !== '0s' || s.animationName !== 'none'; }).length"
    )
    assert moving == 0
