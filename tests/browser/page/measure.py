"""What the panel bears: the longest time between two frames while lines and points of many ranks come in."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.browser.page.conftest import ADDRESS, serve
from tests.browser.page.feeds import start

# Messages are made first, as the text that comes over the wire; reading it is part of the page's work.
RUN = """async ([first, lines, points, seconds, size, side]) => {
    const paintings = [];
    const { draw } = panel.View.prototype;
    panel.View.prototype.draw = function () {
        const from = performance.now();
        draw.call(this);
        paintings.push(performance.now() - from);
    };
    start(); give(first);
    const messages = [];
    for (let k = 0; k < seconds * 10; k++) {
        const message = { seq: k + 2, lines: [], metrics: [], progress: [], now: first.now + k / 10 };
        for (let i = 0; i < lines; i++) message.lines.push([i % size, i % 97 ? 0 : 1,
            `\\x1b[36mstep\\x1b[0m ${k * lines + i} loss \\x1b[1m${Math.random()}\\x1b[0m lr 3.00e-04 \\x1b[38;5;208m${"data ".repeat(9)}\\x1b[0m`, k, 0]);
        for (const name of ["loss", "lr", "norm", "speed"]) for (let rank = 0; rank < size; rank++) {
            const own = [];
            for (let i = 0; i < points; i++) own.push([k * points + i, Math.exp(-k / 40) + Math.random() / 9, k]);
            message.metrics.push([name, rank, own]);
        }
        for (let rank = 0; rank < size; rank++) message.progress.push([rank, "train", k, seconds * 10, 10, "it", 0]);
        messages.push(JSON.stringify(message));
    }
    if (side) document.querySelectorAll(".anb-plain-btn").forEach((one) => one.textContent === "Side by side" && one.click());
    await new Promise((done) => setTimeout(done, 800));
    const gaps = []; const long = []; let before = performance.now(); let measuring = true;
    new PerformanceObserver((list) => { for (const one of list.getEntries()) long.push(one.duration); }).observe({ type: "longtask" });
    const frame = (now) => { gaps.push(now - before); before = now; if (measuring) requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
    let fed = 0;
    await new Promise((done) => { const timer = setInterval(() => {
        const from = performance.now();
        if (messages.length) give(JSON.parse(messages.shift())); else { clearInterval(timer); setTimeout(done, 600); }
        fed += performance.now() - from;
    }, 100); });
    measuring = false;
    gaps.sort((a, b) => a - b);
    paintings.sort((a, b) => a - b);
    return { longest_gap_ms: gaps.at(-1), gap_99_ms: gaps[Math.floor(gaps.length * .99)], frames: gaps.length,
        paintings: paintings.length, longest_painting_ms: paintings.at(-1), painting_50_ms: paintings[paintings.length >> 1],
        long_tasks: long.length, longest_task_ms: Math.max(0, ...long), feeding_ms: fed / (seconds * 10),
        nodes: document.querySelectorAll(".anb *").length, heap_MB: performance.memory.usedJSHeapSize / 1e6 };
}"""


def measured(page: Any, *, lines: int, points: int, seconds: int, size: int, side: bool = False) -> dict[str, float]:
    """What one feed did to a fresh page."""
    page.route("**/*", serve)
    page.goto(ADDRESS)
    page.wait_for_function("window.ready === true")
    session = page.context.new_cdp_session(page)
    # seconds of the processor, which do not grow with what else the machine does
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    found = page.evaluate(RUN, [start(size), lines, points, seconds, size, side])
    spent = {item["name"]: item["value"] for item in session.send("Performance.getMetrics")["metrics"]}
    return found | {"cpu_s": spent["TaskDuration"], "cpu_layout_s": spent["LayoutDuration"], "seconds": seconds}


def main(light: bool) -> None:
    share = 10 if light else 1
    eight = {"lines": 1000 // share, "points": 62 // share, "seconds": 10, "size": 8}
    feeds = {
        "8 ranks, 100,000 lines, 200,000 points": eight,
        "the same, side by side": {**eight, "side": True},
        "64 ranks, 10,000 lines, 50,000 points": {"lines": 100, "points": 2, "seconds": 10, "size": 64},
        "nothing to show": {"lines": 0, "points": 0, "seconds": 5, "size": 8},
    }
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        for name, feed in feeds.items():
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            found = measured(page, **feed)
            print(name, json.dumps({key: round(value, 1) for key, value in found.items()}))
            page.close()
        browser.close()


if __name__ == "__main__":
    main("light" in sys.argv)
