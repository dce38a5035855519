"""What a page does when the kernel behind its panel ends, or can't be reached."""

from typing import Any

import pytest

from tests.browser.page.feeds import STARTED, give, running, sent

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

VIEW = "application/vnd.jupyter.widget-view+json"
# a session and a document as JupyterLab has them, as far as a panel looks at them
NOTEBOOK = """
(cell) => {
  const signal = () => { const slots = new Set(); return { connect: (s) => slots.add(s), disconnect: (s) => slots.delete(s), emit: (v) => slots.forEach((s) => s(null, v)) }; };
  const list = [{ data: { "application/vnd.jupyter.widget-view+json": { model_id: "p1" }, "text/html": "old" } }];
  const outputs = { get length() { return list.length }, get: (i) => ({ ...list[i], toJSON: () => list[i] }), set: (i, v) => { list[i] = v; puts.push(i) }, add: (v) => list.push(v) };
  const session = { statusChanged: signal(), connectionStatusChanged: signal(), kernelChanged: signal(), session: { kernel: { id: "k1" } } };
  window.session = session;
  window.puts = [];
  window.outputs = list;
  window.saved = 0;
  window.content = { cells: [{ id: "c1", outputs }], dirty: false, contentChanged: signal() };
  // as in JupyterLab, what changes during a save is taken for saved
  const save = async () => { window.saved++; await window.whileSaving?.(); content.dirty = false };
  model.widget_manager = { context: { sessionContext: session, model: content, save } };
  model.traits.place = { panel: "p1", cell: "c1" };
  model.traits._css = "css";
}
"""


@pytest.fixture
def panel_page(page: Any, show: Any) -> Any:
    """The page of a run in a notebook whose kernel is there."""
    page.evaluate(NOTEBOOK)
    return show(running(2))


@pytest.mark.parametrize(
    ("statuses", "message"),
    [
        (["restarting"], "The kernel was restarted"),
        (["restarting", "autorestarting"], "The kernel died"),
        (["autorestarting", "restarting", "starting"], "The kernel died"),
        (["dead"], "The kernel died"),
        (["terminating"], "The kernel was shut down"),
    ],
)
def test_the_end_of_the_kernel_is_the_end_of_the_run(panel_page: Any, statuses: list[str], message: str) -> None:
    give(panel_page, lines=[[0, 1, "UserWarning: <slow>", 9e9, 0, "warning"]])
    panel_page.evaluate("(statuses) => statuses.forEach((one) => session.statusChanged.emit(one))", statuses)
    panel = panel_page.locator(".anb")
    expect(panel.get_by_role("note")).to_contain_text(message)
    expect(panel.locator(".anb-title .anb-chip")).to_have_text("■stopped")
    for name in ("Stop", "Stacks", "Whole file"):
        expect(panel.get_by_role("button", name=name, exact=True)).to_have_count(0)
    clock = panel.locator(".anb-elapsed").inner_text()
    panel_page.wait_for_timeout(1300)
    assert panel.locator(".anb-elapsed").inner_text() == clock
    # the notebook keeps what the page knows, in the panel's place, and is saved
    panel_page.wait_for_function("window.saved === 1")
    [kept] = panel_page.evaluate("window.outputs")
    assert set(kept["data"]) == {"text/html", "text/plain"}
    text = kept["data"]["text/plain"]
    for part in (message, "rank 1  stopped  train 326/600 · 24.8 it/s", "step   234", "<slow>", "attach("):
        assert part in text
    assert "saving checkpoint" not in text  # a line that has not ended
    assert kept["data"]["text/html"].startswith("<pre id=")
    assert "UserWarning: &lt;slow&gt;" in kept["data"]["text/html"]


def test_a_kernel_that_is_shut_down_in_good_order_has_the_last_word(panel_page: Any) -> None:
    # at once: half a second later the page would leave its own report
    panel_page.evaluate(
        """() => {
            session.statusChanged.emit("terminating");
            give({ seq: 3, state: { state: "stopped", ended: Date.now() / 1000 } });
        }"""
    )
    expect(panel_page.locator(".anb").get_by_role("note")).to_contain_text("Stopped by you")
    expect(panel_page.get_by_role("region", name="The error")).to_have_count(0)
    # the report is its own, and the notebook is saved with it
    panel_page.wait_for_function("window.saved === 1")
    assert panel_page.evaluate("window.outputs[0].data['text/html']") == "old"


def test_a_notebook_that_is_closed_as_its_kernel_is_shut_down_is_not_saved(panel_page: Any) -> None:
    panel_page.evaluate(
        "() => { session.statusChanged.emit('terminating'); model.widget_manager.context.isDisposed = true }"
    )
    panel_page.wait_for_function("outputs[0].data['text/html'] !== 'old'")
    assert panel_page.evaluate("[saved, content.dirty]") == [0, False]


def test_a_detached_run_goes_on_without_the_kernel_and_the_panel_shows_how_to_attach(panel_page: Any) -> None:
    give(panel_page, seq=3, run={"attach": 'accelerate_nb.attach("/runs/a")'})
    panel_page.evaluate("() => session.statusChanged.emit('restarting')")
    panel = panel_page.locator(".anb")
    expect(panel.get_by_role("note")).to_contain_text("goes on without it")
    expect(panel.get_by_role("note")).to_contain_text('accelerate_nb.attach("/runs/a")')
    expect(panel.locator(".anb-title .anb-chip")).to_have_text("▶running")
    expect(panel.get_by_role("button", name="Stop", exact=True)).to_have_count(0)


def test_another_kernel_of_the_notebook_ends_it_too(panel_page: Any) -> None:
    panel_page.evaluate("() => session.kernelChanged.emit({})")
    expect(panel_page.locator(".anb").get_by_role("button", name="Stop")).to_be_visible()
    panel_page.evaluate("() => { session.session = null; session.kernelChanged.emit({}) }")
    expect(panel_page.locator(".anb").get_by_role("note")).to_contain_text("The kernel was shut down")


def test_a_lost_connection_stops_the_clock_until_it_is_there_again(panel_page: Any) -> None:
    panel = panel_page.locator(".anb")
    panel_page.evaluate("() => session.connectionStatusChanged.emit('connecting')")
    expect(panel.locator(".anb-title .anb-chip")).to_have_text("•not connected")
    expect(panel.locator(".anb-notes")).to_contain_text("the kernel can't be reached")
    expect(panel.get_by_role("button", name="Stop")).to_have_count(0)
    clock = panel.locator(".anb-elapsed").inner_text()
    panel_page.wait_for_timeout(1300)
    assert panel.locator(".anb-elapsed").inner_text() == clock
    hellos = len(sent(panel_page, "hello"))
    panel_page.evaluate("() => session.connectionStatusChanged.emit('connected')")
    expect(panel.get_by_role("button", name="Stop")).to_be_visible()
    expect(panel.locator(".anb-elapsed")).not_to_have_text(clock)
    # all that came meanwhile is told anew
    *former, last = sent(panel_page, "hello")
    assert (len(former), last["seq"]) == (hellos, 0)


def test_a_run_that_is_over_outlives_its_kernel(panel_page: Any) -> None:
    give(panel_page, seq=3, state={"state": "finished", "ended": STARTED + 75})
    panel_page.evaluate("() => session.statusChanged.emit('restarting')")
    expect(panel_page.locator(".anb-title .anb-chip")).to_have_text("✓finished")
    assert panel_page.evaluate("window.outputs[0].data['text/html']") == "old"


def test_a_report_of_the_kernel_that_comes_while_the_page_saves_its_own_is_saved_too(panel_page: Any) -> None:
    was_dirty = panel_page.evaluate(
        """async () => {
            const dirty = [];
            window.whileSaving = async () => {
                dirty.push(content.dirty);
                await new Promise((next) => setTimeout(next, 20));
                if (saved === 1) { outputs[0] = { data: { "text/plain": "Stopped by you" } }; content.contentChanged.emit() }
            };
            session.statusChanged.emit("terminating");
            while (saved < 2 || content.dirty) await new Promise((next) => setTimeout(next, 20));
            return dirty;
        }"""
    )
    assert was_dirty == [True, True]
    panel_page.wait_for_timeout(300)
    assert panel_page.evaluate("[saved, outputs[0].data['text/plain']]") == [2, "Stopped by you"]


def test_a_page_that_never_saw_the_panel_puts_it_back_under_its_cell(page: Any) -> None:
    page.evaluate(NOTEBOOK)
    page.evaluate("() => { outputs.length = 0; window.start() }")
    assert page.evaluate(f"() => outputs.map((one) => one.data['{VIEW}'].model_id)") == ["p1"]
    # where it is already, or the cell shows something else, it is left alone
    page.evaluate("() => window.start()")
    page.evaluate("() => { outputs[0] = { data: { 'text/plain': 'another run' } }; window.start() }")
    assert page.evaluate("() => outputs.length") == 1


def test_a_panel_whose_model_is_not_found_is_drawn_again_once(page: Any) -> None:
    page.evaluate(NOTEBOOK)
    gives_up = """() => here.insertAdjacentHTML(
        "beforeend", '<div class="jp-OutputArea-output jupyter-widgets">Error displaying widget: model not found</div>')"""
    page.evaluate("() => { window.end = panel.default().initialize({ model: { ...model } }) }")
    page.evaluate(gives_up)
    page.wait_for_function("puts.length > 0")
    assert page.evaluate("puts") == [0]
    # also where it said so before the model was made; and not where the panel is drawn, and another widget is lost
    page.evaluate(NOTEBOOK)
    page.evaluate("() => { end(); here.replaceChildren() }")
    page.evaluate(gives_up)
    page.evaluate("() => void start()")
    assert page.evaluate("puts") == [0]
    page.evaluate(gives_up)
    assert page.evaluate("puts") == [0]


@pytest.mark.parametrize(
    ("places", "redrawn"),
    [
        pytest.param([{"panel": "p0"}, {"panel": "p1"}], [0], id="two panels"),
        pytest.param([{"report": "r1"}], [], id="a run that has ended"),
    ],
)
def test_where_a_notebook_found_no_model_each_panel_is_drawn_again_and_nothing_else(
    page: Any, places: list[dict[str, str]], redrawn: list[int]
) -> None:
    page.evaluate(NOTEBOOK)
    page.evaluate(
        """(places) => {
            outputs.push({ data: { "text/plain": "no panel" } });
            for (const place of places) panel.default().initialize({ model: { ...model, get: (name) => ({ place })[name] } });
            here.innerHTML = '<div class="jp-OutputArea-output jupyter-widgets">Error displaying widget: model not found</div>';
        }""",
        places,
    )
    page.evaluate("() => new Promise(requestAnimationFrame)")
    assert page.evaluate("puts") == redrawn
