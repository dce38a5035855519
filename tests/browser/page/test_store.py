"""What the page keeps of what the kernel says."""

from typing import Any

import pytest

from tests.browser.page.feeds import start


def _pieces(page: Any, text: str) -> Any:
    return page.evaluate("(text) => panel.ansi(text)", text)


def test_colours_of_all_three_kinds_are_read(page: Any) -> None:
    text = "\x1b[31mred\x1b[0m \x1b[38;5;208morange\x1b[39m \x1b[48;2;1;2;3mblue\x1b[49m \x1b[1;94mbold"
    assert _pieces(page, text) == [
        {"text": "red", "css": "color:var(--anb-a1)"},
        {"text": " ", "css": ""},
        {"text": "orange", "css": "color:rgb(255,135,0)"},
        {"text": " ", "css": ""},
        {"text": "blue", "css": "color:#fff;background:rgb(1,2,3)"},
        {"text": " ", "css": ""},
        {"text": "bold", "css": "color:var(--anb-a12);font-weight:700"},
    ]


@pytest.mark.parametrize(
    ("codes", "css"),
    [
        ("97;44", "color:rgb(255,255,255);background:rgb(20,80,200)"),
        ("30;47", "color:rgb(0,0,0);background:rgb(229,229,229)"),
        ("44", "color:#fff;background:rgb(20,80,200)"),
        ("103", "color:#000;background:rgb(230,200,60)"),
        ("7;97;44", "color:rgb(20,80,200);background:rgb(255,255,255)"),
        ("7;44", "color:rgb(20,80,200);background:#fff"),
        ("38:5:231;48:2::20:80:200", "color:rgb(255,255,255);background:rgb(20,80,200)"),
        ("38;5;231;48;5;4", "color:rgb(255,255,255);background:rgb(20,80,200)"),
        # a colour alone is the theme's, so that it can be read on the page's ground
        ("97", "color:var(--anb-a15)"),
        ("7;31", "color:var(--anb-bg);background:var(--anb-a1)"),
    ],
)
def test_a_colour_on_a_ground_of_its_own_is_the_same_in_every_theme(page: Any, codes: str, css: str) -> None:
    assert _pieces(page, f"\x1b[{codes}mtext") == [{"text": "text", "css": css}]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[2K\x1b[1Aup", "up"),
        ("\x1b]8;;https://x.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x07b\x00c\td", "abc\td"),
        ("\x1b[?25lhidden\x1b[?25h", "hidden"),
        ("\x1bPq#0\x1b\\a\x9b2J\x9d0;b\x9cc\x1b_d\x1b\\", "ac"),
        ("\u202ea\u2066b\u2069\u200f \U0001f468\u200d\U0001f469", "ab \U0001f468\u200d\U0001f469"),
        ("\x1b[m\x1b[99999mtext\x1b[38;5", "text"),
        ("", ""),
    ],
)
def test_control_characters_leave_nothing_behind(page: Any, text: str, left: str) -> None:
    assert page.evaluate("(text) => panel.plain(text)", text) == left
    assert "".join(piece["text"] for piece in _pieces(page, text)) == left


def test_a_ring_keeps_the_newest_lines_and_counts_the_others(page: Any) -> None:
    kept = page.evaluate(
        """() => {
            const ring = new panel.RingBuffer(3, 100);
            for (let i = 0; i < 8; i++) ring.push({ text: "line " + i });
            const long = new panel.RingBuffer(10, 12);
            for (const text of ["aaaaa", "bbbbb", "ccccc"]) long.push({ text });
            const texts = (ring) => Array.from({ length: ring.length }, (_, i) => ring.at(i).text);
            return [texts(ring), ring.dropped, texts(long), long.dropped, long.size];
        }"""
    )
    assert kept == [["line 5", "line 6", "line 7"], 5, ["bbbbb", "ccccc"], 1, 10]


def _store(page: Any, messages: list[dict[str, Any]], read: str) -> Any:
    return page.evaluate(
        "([messages, read]) => { const store = panel.makeStore(); for (const one of messages) panel.feed(store, one);"
        " return new Function('store', 'return ' + read)(store); }",
        [messages, read],
    )


def test_a_rank_that_nobody_announced_gets_its_place(page: Any) -> None:
    messages = [start(2), {"seq": 2, "lines": [[5, 0, "late", 1.0, 0], [3, 0, "later", 1.0, 0]]}]
    assert _store(page, messages, "[...store.ranks.keys()]") == [0, 1, 3, 5]


def test_memory_is_bounded_however_much_comes(page: Any) -> None:
    sizes = page.evaluate(
        """(first) => {
            const store = panel.makeStore();
            panel.feed(store, first);
            for (let k = 0; k < 60; k++) {
                const lines = [];
                for (let i = 0; i < 2000; i++) lines.push([i % 2, 0, "x".repeat(i % 50 ? 40 : 30000), k, 0]);
                const points = Array.from({ length: 10000 }, (_, i) => [k * 10000 + i, Math.sin(i), k]);
                panel.feed(store, { seq: k + 2, lines, metrics: [["loss", 0, points]] });
            }
            const series = store.metrics.get("loss").get(0);
            const ranks = [...store.ranks.values()];
            return { all: store.all.length, rank: Math.max(...ranks.map((rank) => rank.ring.length)), points: series.length,
                     came: series.pointCount, longest: store.all.at(0).text.length,
                     characters: store.all.size };
        }""",
        start(2),
    )
    assert sizes["all"] <= 50_000
    assert sizes["rank"] <= 20_000
    assert sizes["points"] <= 400_000
    assert sizes["came"] == 600_000
    assert sizes["longest"] < 11_000
    assert sizes["characters"] <= 24_000_000


def test_series_that_are_equally_long_are_thinned_together(page: Any) -> None:
    # one after the other, each message of many ranks would take seconds
    sizes = page.evaluate(
        """() => {
            const store = panel.makeStore();
            const points = Array.from({ length: 401 }, (_, step) => [step, 0, 0]);
            panel.feed(store, { metrics: Array.from({ length: 1000 }, (_, rank) => ["loss", rank, points]) });
            return [store.points, Math.max(...[...store.metrics.get("loss").values()].map((curve) => curve.length))];
        }"""
    )
    assert sizes == [101_000, 101]


def test_a_spike_among_many_points_is_still_drawn(page: Any) -> None:
    found = page.evaluate(
        """() => {
            const series = new panel.Series();
            for (let i = 0; i < 200000; i++) series.add(i, i === 123456 ? 1000 : 1);
            const columns = panel.columns(series, 0, 199999, 300, false);
            return [columns.filter((one) => one && one.most === 1000).length, series.nearest(123456.2), columns.length];
        }"""
    )
    assert found == [1, [123456, 1000], 300]


def test_a_band_of_ranks_that_report_at_different_steps_does_not_zigzag(page: Any) -> None:
    bands = page.evaluate(
        """() => {
            const series = [0, 1, 2].map(() => new panel.Series());
            for (let i = 0; i < 40; i++) series[i % 2].add(i, i % 2);
            series[2].add(0, 2); // one value, which is carried forward
            const bandOf = (from, to) => panel.bandOf(series.map((one) => panel.columns(one, from, to, 101, false)));
            return [bandOf(0, 39), bandOf(10, 12.5)].map((band) => band.map(({ least, most, mean }) => [least, most, mean]));
        }"""
    )
    assert bands[0] == [[0, 2, 1]] * 40
    # what is out of sight counts at the edges
    assert bands[1] == [[0, 2, 1]] * 3


def test_what_is_not_finite_is_known_and_left_out(page: Any) -> None:
    points = [[0, 1.0, 0], [1, "nan", 0], [2, "inf", 0], [3, "-inf", 0], [4, 3.0, 0]]
    read = "(({oddAt, least, most, last}) => [oddAt[0], least, most, last])(store.metrics.get('loss').get(0))"
    assert _store(page, [start(1), {"seq": 2, "metrics": [["loss", 0, points]]}], read) == [3, 1, 3, [4, 3]]


def test_steps_that_begin_again_still_find_the_nearest(page: Any) -> None:
    near = page.evaluate(
        """() => {
            const series = new panel.Series();
            for (const [x, y] of [[0, 1], [10, 2], [0, 3], [10, 4], [20, 5]]) series.add(x, y);
            return [series.nearest(9), series.nearest(100), series.nearest(-5)];
        }"""
    )
    assert near == [[10, 4], [20, 5], [0, 3]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("number(0.00001234)", "1.23e-5"),
        ("number(1234567)", "1.23e6"),
        ("number(0.5)", "0.5000"),
        ("number(9999.6)", "10000"),
        ("milliseconds(1234567)", "1230 s"),
        ("number(12)", "12"),
        ("number(NaN)", "nan"),
        ("number(undefined)", "–"),
        ("duration(3723)", "1:02:03"),
        ("duration(59.9)", "00:59"),
        ("bytes(85899345920)", "80.0 GiB"),
        ("bytes(512)", "512 B"),
        ("count(1234)", "1,234"),
        ("count(2.5e6)", "2.50 M"),
    ],
)
def test_numbers_are_written_short(page: Any, call: str, text: str) -> None:
    assert page.evaluate(f"() => panel.{call}") == text


def test_a_report_that_the_page_saves_has_the_ranks_of_each_node_and_what_makes_steps_slow(page: Any) -> None:
    text = page.evaluate(
        """() => {
          const store = panel.makeStore();
          panel.feed(store, { run: { size: 3, folder: "/runs/a" }, nodes: [[0, "node 0 · a", 0, 1], [1, "node 1 · b", 2, 2]],
            ranks: [[2, "failed", "", 0]], causes: ["a cause"], metrics: [["loss", 1, [[0, 0.5, 1]]]], lines: [[1, 0, "a line", 1, 0]] });
          return panel.savedReport(store)["text/plain"];
        }"""
    )
    assert [line for line in text.splitlines() if line.startswith(("node", "rank", "a cause"))] == [
        *("node 0 · a  ranks 0–1  starting", "rank 0  starting", "rank 1  starting  loss 0.5000"),
        *("node 1 · b  rank 2  failed", "rank 2  failed", "a cause", "rank 1: the last 1 of 0 lines"),
    ]
    assert text.endswith('accelerate_nb.attach("/runs/a") shows it again, with its curves.')
