"""A run's static report: complete, bounded, escaped, and the same wherever parts of it are taken away."""

import difflib
import html.parser
import itertools
import json
import math
import random
import re
import xml.etree.ElementTree as ET
from urllib.parse import unquote

import bleach
import nbformat
import pytest
from msgspec import structs
from nbconvert.preprocessors.sanitize import SanitizeHTML

from accelerate_nb.events.event_types import (
    DeviceSample,
    Failure,
    LogLine,
    MemoryUse,
    MeshCoordinates,
    Metric,
    NodeRanks,
    ProfiledOperation,
    Progress,
    Restart,
    StateChange,
    StepProfile,
)
from accelerate_nb.events.run_state import RunState
from accelerate_nb.reports.metric_curves import curves_of, metric_facts, not_finite_text, series_of
from accelerate_nb.reports.report import run_report
from accelerate_nb.reports.run_table import mean_metrics
from accelerate_nb.reports.summary import batch_factor, memory_parts
from tests.reports import stories

MOST = 100_000
SVG = "{http://www.w3.org/2000/svg}"
NASTY = [
    "<script>alert(1)</script>",
    "</pre></details><img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "<!--",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "&lt;b&gt;",
    "\x1b[31m<b>\x1b[0m",
]


def report(view, *, live=False, name="train"):
    return run_report(stories.facts(name, len(view.ranks)), view, live=live)


def saved_size(data):
    """The bytes that this output adds to a notebook's file."""

    def size(*outputs):
        cell = nbformat.v4.new_code_cell(id="a", outputs=list(outputs))
        return len(nbformat.writes(nbformat.v4.new_notebook(cells=[cell])).encode())

    return size(nbformat.v4.new_output("display_data", data=data)) - size()


class Reader(html.parser.HTMLParser):
    """What a browser would find in HTML: text, tags, and those that were not closed as they were opened."""

    VOID = frozenset({"img", "br"})

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.attributes, self.faults, self.parts = [], [], [], [], []
        self.feed(source)
        self.close()
        self.faults += self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        if self.open[-1:] != ["script"]:
            self.parts.append(data)

    @property
    def text(self):
        return " ".join("".join(self.parts).split())


# ------------------------------------------------------------------------------------------------------------- what it says

ESSENTIAL = [
    "train",
    "failed",
    "rank 1 stopped with ValueError: Expected input batch_size (32) to match target batch_size (16).",
    "Cell In[3], line 9, in train",
    "loss = criterion(model(x), y)",
    "2 calls folded",
    "pass drop_last=True",
    "ranks 0,2-3 lost their connections",
    "151/300",
    "cuda:3 87%",
    "40.0 ms: data 62 %, backward 25 %, forward 12 %",
    "waiting for the loader was 62 % of the step (num_workers=0): pass num_workers=4 to the DataLoader",
    "memory 131.3/238.4 GiB",
    "loss",
    "▁▁▁",
    "1.50e-4",
    "3.00e-4",
    "step 299",
    "step 290 loss 0.5519 grad_norm 0.7",
    "UserWarning: careful <script>alert(1)</script>",
    "/runs/train",
]


def test_a_report_explains_why_former_attempts_ended():
    view = stories.view_of(Restart(1, 3, "rank 1 stopped with Error: <b>", 0.1, stories.STARTED), size=2)
    for live in (False, True):
        made = report(view, live=live)
        assert "restart 1 of 3, after 0.1 s: rank 1 stopped with Error: <b>" in made["text/plain"]
        assert "restart 1 of 3, after 0.1 s: rank 1 stopped with Error: &lt;b&gt;" in made["text/html"]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (MeshCoordinates(1, {"dp_shard": 1, "tp": 0}, stories.STARTED), "dp_shard 1 tp 0"),
        (
            MemoryUse(1, 2**20, 2**20, 2**21, 2**30, stories.STARTED),
            "holds 1.0 MiB of weights, 1.0 MiB of gradients, 2.0 MiB of optimizer; peak 1.0 GiB",
        ),
    ],
)
def test_a_report_shows_the_place_of_a_rank_in_a_mesh_and_what_it_holds(event, words):
    for text in report(stories.view_of(event, size=2)).values():
        assert words in text


def test_a_report_names_the_node_of_each_row():
    nodes = [NodeRanks(0, "a", 0, 1), NodeRanks(1, "<b>", 2, 3)]
    made = report(stories.view_of(*nodes, size=4))
    rows = [re.split(r"  +", line)[:2] for line in made["text/plain"].splitlines() if line.startswith("node")]
    assert rows[0] == ["node", "rank"]
    assert rows[1:] == [["node 0 · a", "0"], ["node 0 · a", "1"], ["node 1 · <b>", "2"], ["node 1 · <b>", "3"]]
    assert "node 1 · &lt;b&gt;" in made["text/html"]
    assert "<b>node</b>" in made["text/html"]
    alone = report(stories.view_of(size=4))
    assert "node" not in alone["text/plain"]
    assert "<b>node</b>" not in alone["text/html"]


def test_a_report_shows_what_of_a_gpu_is_in_use_and_what_batch_would_fit():
    gib = 2**30
    memory = MemoryUse(0, gib, gib, 2 * gib, 69 * gib, stories.STARTED, used=71 * gib, total=80 * gib)
    in_use = "65.0 GiB of activations, 2.0 GiB of others; peak 71.0/80.0 GiB: a batch of about 1.1 × would fit"
    for text in report(stories.view_of(memory)).values():
        assert in_use in text
    # where next to nothing is free, or what grows with a batch is not known, nothing is promised
    for tight in ({"used": 79 * gib}, {"peak": 4 * gib, "used": 6 * gib}, {"peak": 0}, {"total": None}):
        assert batch_factor(structs.replace(memory, **tight)) is None


def test_a_report_shows_of_a_cpu_only_what_its_process_takes():
    memory = MemoryUse(0, 2**20, 2**20, 2**21, None, stories.STARTED, used=2**29)
    assert memory_parts(memory) == (2**20, 2**20, 2**21, 0, 2**29 - 2**22)
    for text in report(stories.view_of(memory)).values():
        assert "2.0 MiB of optimizer; the process takes 512.0 MiB in all" in text
        assert "would fit" not in text


def test_a_report_has_the_newest_profile_of_the_first_rank_that_has_one():
    costs = {"aten::mm": (1200, 0.3, 0.6), "<b>": (1, 2e-5, 4e-5)}
    operations = tuple(ProfiledOperation(name, *cost, "cuda") for name, cost in costs.items())
    profiles = [
        StepProfile(0, 1, 10, 9.0, operations, "/runs/old", stories.STARTED),
        StepProfile(0, 2, 0, 0.0, (), "", stories.STARTED, "no optimizer step was seen"),
        *(StepProfile(rank, 2, 10, 0.5, operations, "/runs/trace", stories.STARTED) for rank in (1, 2)),
    ]
    texts = report(stories.view_of(*profiles, size=3))
    head = "rank 1, profile of 10 steps: 50 ms a step, costliest operations on the CUDA (profiled: ranks 0–2)"
    for text in texts.values():
        assert head in text
        assert "/runs/trace" in text
        assert "/runs/old" not in text
    assert "aten::mm   1,200  300 ms     60.0%\n<b>        1      0.02 ms    0.0%" in texts["text/plain"]
    refused = report(stories.view_of(profiles[1], size=1))["text/plain"]
    assert "rank 0 was not profiled: no optimizer step was seen" in refused


@pytest.mark.parametrize("essential", ESSENTIAL)
@pytest.mark.parametrize("mime_type", ["text/html", "text/plain"])
def test_html_and_text_hold_the_same(mime_type, essential):
    made = report(stories.failed())[mime_type]
    read = Reader(made).text if mime_type == "text/html" else " ".join(made.split())
    assert essential in read


def test_a_run_that_goes_on_shows_where_it_is_and_what_it_wrote_last():
    data = report(stories.idle_warning(), live=True)
    for made in (Reader(data["text/html"]).text, data["text/plain"]):
        assert "running" in made
        assert "Rank 0 waits in all_reduce" in made
        assert "150/300 24.9 it/s 00:06" in made
        assert re.search(r"\[1\] step +290", made)
    assert "details" not in Reader(data["text/html"]).tags  # an unfolded one would fold again with every update


def test_a_run_that_only_begins_has_a_report():
    data = report(stories.view_of(size=2), live=True)
    assert "starting" in data["text/plain"]
    assert Reader(data["text/html"]).faults == []


def test_many_ranks_are_reported_in_groups_with_the_odd_one_by_itself():
    view = stories.training(64, 20)
    view.apply(Failure(40, "KeyError", "'x'", "", stories.STARTED + 3))
    view.apply(StateChange(40, "failed", stories.STARTED + 3))
    text = report(stories.end(view, "stopped"))["text/plain"]
    rows = [line.split()[0] for line in text.splitlines() if re.match(r"[\d–, ]+ +[✖■]", line)]
    assert rows == ["0", "40", "63", "1–39,"]
    assert "1–39, 41–62" in text
    # on several nodes, in groups of each of them
    for node in range(4):
        view.apply(NodeRanks(node, f"host-{node}", 16 * node, 16 * node + 15))
    text = report(stories.end(view, "stopped"))["text/plain"]
    rows = [re.split(r"  +", line)[:2] for line in text.splitlines() if line.startswith("node ")]
    assert [(node[-1], ranks) for node, ranks in rows[1:]] == [
        *(("0", "0"), ("0", "1–15"), ("1", "16–31")),
        *(("2", "40"), ("2", "32–39, 41–47"), ("3", "63"), ("3", "48–62")),
    ]


NAN = float("nan")


@pytest.mark.parametrize(
    ("of_ranks", "words"),
    [
        ([[1.0, 0.5, NAN, NAN]], "NaN since step 20"),
        ([[1.0, NAN, NAN, NAN], [1.0, 0.5, NAN, NAN]], "NaN since step 10, on all ranks"),
        ([[1.0, 0.5, 0.4, 0.3], [1.0, 0.5, NAN, NAN]], "NaN since step 20, on rank 1"),
        ([[1.0, 0.5, math.inf, math.inf]], "infinite since step 20"),
        ([[1.0, NAN, 0.4, 0.3], [1.0, 0.5, 0.4, 0.3]], "NaN until step 10, on rank 0"),
    ],
)
def test_where_numbers_are_none_is_in_words(of_ranks, words):
    values = [(rank, step, value) for rank, some in enumerate(of_ranks) for step, value in enumerate(some)]
    events = [Metric(rank, "loss", value, 10 * step, step) for rank, step, value in values]
    made = report(stories.end(stories.view_of(*events, size=len(of_ranks))))
    assert words in made["text/plain"]
    assert words in Reader(made["text/html"]).text
    assert words in pictures(made["text/html"])[0]


def test_the_first_number_that_is_none_is_not_thinned_away():
    view = RunState(size=1, points=10)
    for step in range(100):
        view.apply(Metric(0, "loss", NAN if step > 60 else 1.0, step, step))
    assert not_finite_text(series_of([view.rank(0)], "loss")) == "NaN since step 61"


def test_a_number_that_was_logged_once_is_a_number_and_no_picture():
    made = report(stories.end(stories.view_of(Metric(0, "train_runtime", 12.5, 60, 1.0), size=1)))
    assert re.search(r"train_runtime +min 12.5 +max 12.5 +last 12.5 +step 60", made["text/plain"])
    assert pictures(made["text/html"]) == []


def test_metrics_that_have_no_room_are_counted():
    points = itertools.product(range(50), range(2), range(40))
    metrics = [Metric(rank, f"group/metric_{number}", step + number, step, step) for number, rank, step in points]
    html = report(stories.end(stories.view_of(*metrics, size=2)))["text/html"]
    shown = {*re.findall(r"(metric_\d+)</td>", html)}
    assert f"… {50 - len(shown)} more metrics not shown here" in html
    assert f"… {50 - len(pictures(html))} more curves not shown here" in html


# Ranks report what they measure at steps of their own; `its/s` and the like are numbers of the code, whatever they count.
RATES = ["samples_per_second", "train_steps_per_second", "tokens/s", "it/s", "loss", "speed/steps_per_s"]


def test_only_what_this_package_counts_on_each_rank_is_a_sum():
    names = [*RATES, "speed/samples_per_s", "speed/tokens_per_s"]
    points = itertools.product(names, enumerate([10.0, 20.0, 30.0]), range(2))
    events = [Metric(rank, name, value, step + rank, step + rank / 2) for name, (step, value), rank in points]
    view = stories.end(stories.view_of(*events, size=2))
    curves = {curve.name: curve for curve in curves_of([view.rank(rank) for rank in view.ranks], names)}
    # at the last step of both
    assert {(curves[name].newest, curves[name].how) for name in RATES} == {(25.0, "mean of 2")}
    assert {(curves[name].newest, curves[name].how) for name in names[-2:]} == {(50.0, "sum of 2")}
    # the axis of the sum has the sum's numbers
    assert (curves[names[-1]].low, curves[names[-1]].high) == (20.0, 50.0)
    made = report(view)
    for text in (made["text/plain"], Reader(made["text/html"]).text):
        assert len(re.findall("25 mean of 2", text)) == len(RATES)
        assert len(re.findall("50 sum of 2", text)) == 2
    labels = [ET.fromstring(picture).find(f"{SVG}text") for picture in pictures(made["text/html"])]
    assert sum("".join(label.itertext()).endswith(" 25 mean of 2") for label in labels) == len(names) - 3
    facts = metric_facts([view.rank(rank) for rank in view.ranks])
    assert facts["metrics"]["it/s"] == 25.0
    assert facts["metrics_of"]["it/s"] == "mean of 2"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, -1e308, 0.0, 1e-300, 5e-324])
def test_any_number_can_be_drawn(value):
    view = stories.view_of(*(Metric(0, "a", item, None, 1.0) for item in (value, -value, value)), size=1)
    assert "a" in report(stories.end(view))["text/plain"]


# ------------------------------------------------------------------------------------------------------------------ pictures


def pictures(made):
    return [unquote(value.partition("svg+xml,")[2]) for name, value in Reader(made).attributes if name == "src"]


def test_every_metric_is_a_picture_with_a_line_for_each_rank():
    loss, rate = map(ET.fromstring, pictures(report(stories.finished(4))["text/html"]))
    assert len({path.get("stroke") for path in loss.iter(f"{SVG}path")}) == 4
    assert len(list(rate.iter(f"{SVG}path"))) == 1
    assert "loss" in "".join(loss.itertext())
    # many ranks are a band
    (loss, _) = map(ET.fromstring, pictures(report(stories.end(stories.training(64, 50)))["text/html"]))
    band, mean = loss.iter(f"{SVG}path")
    assert band.get("fill-opacity")
    assert mean.get("stroke")


def test_a_band_of_ranks_that_report_at_different_steps_does_not_zigzag():
    # rank 2 has one value, which is carried forward
    steps = {0: range(0, 40, 2), 1: range(1, 40, 2), 2: [0]}
    events = [Metric(rank, "loss", float(rank), step, step) for rank, own in steps.items() for step in own]
    view = stories.end(stories.view_of(*events, size=3))
    (curve,) = curves_of([view.rank(rank) for rank in view.ranks], ["loss"])
    assert {(bin_.mean, bin_.low, bin_.high) for bin_ in curve.whole[1:]} == {(1.0, 0.0, 2.0)}
    means = [metric.value for metric in mean_metrics(view, 0.0, 0)]
    assert means == [1.0] * 40


def luminance(colour):
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_all_colours_are_distinguished_from_white_and_from_black():
    made = report(stories.failed(8))["text/html"]
    drawn = itertools.chain([made], pictures(made))
    colours = {colour for source in drawn for colour in re.findall(r"#[0-9a-f]{6}", source)}
    assert len(colours) > 8
    for colour in colours:
        assert 1.05 / (luminance(colour) + 0.05) >= 2.9, colour
        assert (luminance(colour) + 0.05) / (luminance("#111111") + 0.05) >= 2.9, colour


# ------------------------------------------------------------------------------------------------------------------ escaping


@pytest.mark.parametrize("nasty", NASTY)
@pytest.mark.parametrize("live", [False, True])
def test_nothing_that_a_run_prints_becomes_markup(nasty, live):
    clean = Reader(report(stories.failed(2), live=live, name="f")["text/html"])
    view = stories.training(2)
    for rank in range(2):
        view.apply(LogLine(rank, "stderr", nasty, stories.STARTED + 40))
        view.apply(Metric(rank, nasty, 1.0, 1, stories.STARTED))
        view.apply(Progress(rank, nasty, 1, 2, stories.STARTED, 1.0, nasty, note=nasty))
        view.apply(DeviceSample(rank, nasty, 1.0, 1, 2, stories.STARTED))
    last = (nasty,) * 3
    failure = Failure(1, nasty, nasty, nasty, stories.STARTED, 3, last_lines=last, advice=nasty)
    view.apply(failure)
    made = report(view, live=live, name=nasty)["text/html"]
    read = Reader(made)
    assert read.faults == []
    assert set(read.tags) - {"span"} <= set(clean.tags) | {"details", "summary", "br"}
    assert "script" not in read.tags
    assert not any(name.startswith("on") for name, _ in read.attributes)
    assert "<!--" not in made


def test_colours_of_a_terminal_are_kept_and_other_sequences_go():
    text = "\x1b[1;31mred\x1b[0m \x1b[38;5;208morange\x1b[38:2::0:1:2mblue\x1b[39m \x1b[2K\x1b]0;title\x07\x08\x00plain\x1b["
    view = stories.view_of(LogLine(0, "stdout", text, 1.0), size=1)
    data = report(stories.end(view))
    assert '<span style="color:#d13438;font-weight:bold;">red</span>' in data["text/html"]
    assert '<span style="color:#ff8700;">orange</span><span style="color:#000102;">blue</span>' in data["text/html"]
    assert "red orangeblue plain" in data["text/plain"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", data["text/html"] + data["text/plain"])


# ----------------------------------------------------------------------------------------------------------------- sanitisers

# What GitHub says that it lets through (html-pipeline's SanitizationFilter): no style, no script, pictures by http alone.
GITHUB_TAGS = [
    *("h1", "h2", "h3", "h4", "h5", "h6", "br", "b", "i", "strong", "em", "a", "pre", "code", "img", "tt", "div"),
    *("ins", "del", "sup", "sub", "p", "ol", "ul", "table", "thead", "tbody", "tfoot", "blockquote", "dl", "dt"),
    *("dd", "kbd", "q", "samp", "var", "hr", "ruby", "rt", "rp", "li", "tr", "td", "th", "s", "strike", "summary"),
    *("details", "caption", "figure", "figcaption", "abbr", "span"),
]
OF_ALL = ["alt", "align", "height", "width", "title", "colspan", "open"]
GITHUB_ATTRIBUTES = {"a": ["href"], "img": ["src"], "*": OF_ALL}


def by_github(made):
    made = re.sub(r"<script.*?</script>", "", made, flags=re.DOTALL)
    return bleach.clean(made, GITHUB_TAGS, GITHUB_ATTRIBUTES, protocols=["http", "https", "mailto"], strip=True)


def by_nbconvert(made, **options):
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", data={"text/html": made})])
    notebook, _ = SanitizeHTML(enabled=True, **options).preprocess(nbformat.v4.new_notebook(cells=[cell]), {})
    return notebook.cells[0].outputs[0]["data"]["text/html"]


SANITISERS = {
    "GitHub": by_github,
    "nbconvert": lambda made: by_nbconvert(made, tags=["table", "tr", "td", "b", "pre", "div"]),
    "nbconvert, stripping": lambda made: by_nbconvert(made, strip=True),
    "nothing but text": lambda made: re.sub(r"<[^>]*>", " ", made),
}


def words(text):
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


@pytest.mark.parametrize("sanitiser", SANITISERS)
def test_a_sanitiser_takes_nothing_away_that_matters(sanitiser):
    read = words(Reader(SANITISERS[sanitiser](report(stories.failed())["text/html"])).text)
    for essential in ESSENTIAL:
        assert words(essential) in read


def test_github_is_left_with_tables_text_and_the_words_of_pictures():
    read = Reader(by_github(report(stories.failed())["text/html"]))
    assert {"table", "pre", "b"} <= set(read.tags)
    assert not any(name in {"src", "style"} for name, _ in read.attributes)
    assert any(name == "alt" and value.startswith("chart of loss up to step 299") for name, value in read.attributes)


# ----------------------------------------------------------------------------------------------------------------------- sizes


def flood(lines=100_000, size=4, text="step {} of a long training log with numbers 0.12345 0.67890"):
    view = stories.view_of(size=size)
    for number in range(lines):
        view.apply(LogLine(number % size, "stderr" if number % 3 else "stdout", text.format(number), float(number)))
    return stories.end(view)


def many_metrics():
    view = stories.view_of(size=64)
    for step in range(120):
        for rank in range(64):
            for metric in range(50):
                view.apply(Metric(rank, f"metric/{metric}", (step * 7919 + rank * 31 + metric) % 101, step, step / 10))
    return stories.end(view)


def one_long_line():
    return stories.end(stories.view_of(LogLine(0, "stdout", "x" * 1_000_000 + "end", 1.0), size=1))


def huge_error():
    view = stories.view_of(size=8)
    for rank in range(8):
        text = f"line of {rank}\n" * 50_000
        view.apply(Failure(rank, "E" * 10_000, text, text, 1.0, last_lines=("é'<" * 9000,) * 8, advice="a" * 10**6))
    return stories.end(view, "failed")


def nothing_but_trouble():
    """All of it, in letters that cost most."""
    characters = "'😀\x1b[31m&\x1b[0m"
    view = flood(20_000, 64, characters * 30)
    for rank in range(64):
        for number in range(100):
            view.apply(Metric(rank, f"{characters * 5}{number}", number, number, 1.0))
            view.apply(DeviceSample(rank, f"{characters * 50}{number}", 1.0, 1, 2, 1.0))
            label, note = f"{characters * 50}{number}", characters * 50
            view.apply(Progress(rank, label, 1, 2, 1.0, 1.0, characters * 9, note=note))
        last, advice = (characters * 100,) * 30, characters * 1000
        view.apply(Failure(rank, characters, characters * 10_000, "", 1.0, last_lines=last, advice=advice))
    return stories.end(view, "failed")


FLOODS = {story.__name__: story for story in (flood, many_metrics, one_long_line, huge_error, nothing_but_trouble)}


@pytest.fixture(scope="module", params=FLOODS)
def flooded(request):
    return FLOODS[request.param]()


def usual():
    """Two ranks that log six noisy numbers in each of 300 steps, a line in each tenth, and are profiled."""
    noise = random.Random(0)
    view = stories.training(2, steps=0)
    for step in range(300):
        time = stories.STARTED + 1 + step / 10 + noise.random() / 100
        for rank in range(2):
            heights = {"loss": 2.3, "accuracy": 0.5, "lr": 0.025, "norm": 9, "val/loss": 2, "val/f1": 1}
            for name, height in heights.items():
                view.apply(Metric(rank, name, height * (1 + noise.random() / 10), step, time))
            if step % 10 == 0:
                view.apply(LogLine(rank, "stdout", f"step {step} loss {noise.random():.4f}", time))
    for rank in range(2):
        costs = [(f"aten::operation_{i}", 100 - i, 0.05 / (i + 1), 0.3 / (i + 1), "cpu") for i in range(10)]
        rows, trace = (ProfiledOperation(*cost) for cost in costs), f"/runs/train/profile_1_rank_{rank}.json.gz"
        view.apply(StepProfile(rank, 1, 10, 0.25, (*rows,), trace, stories.STARTED))
    return stories.end(view)


def test_the_report_of_a_usual_run_takes_25_kb_of_a_notebook_with_its_curves_and_last_lines():
    data = report(usual())
    assert saved_size(data) <= 25_000
    assert len(json.dumps(data)) <= 25_000  # for those who write letters beyond ASCII as escapes
    assert data["text/html"].count("<img") == 6
    assert "<script" not in data["text/html"]
    for made in data.values():
        assert made.count("step 290 loss") == 2
        assert "aten::operation_9" in made


def test_where_one_value_differs_few_lines_of_a_report_do():
    def lines(last):
        view = stories.training(2)
        view.apply(Metric(0, "loss", last, 300, stories.STARTED + 30))
        return report(stories.end(view))["text/html"].splitlines()

    assert lines(0.5) == lines(0.5)
    other = [line for line in difflib.unified_diff(lines(0.5), lines(0.25), n=0, lineterm="") if line[0] == "+"]
    assert len(other) < len(lines(0.5)) / 5


@pytest.mark.parametrize("live", [False, True])
def test_however_much_there_is_a_report_takes_100_kb_of_a_notebook(flooded, live):
    data = report(flooded, live=live)
    assert saved_size(data) <= MOST
    # for those who write letters beyond ASCII as escapes; one that is drawn again and again is in no file
    assert live or len(json.dumps(data)) <= MOST
    assert Reader(data["text/html"]).faults == []


@pytest.mark.parametrize(
    ("story", "words"), [(flood, ["step 99999 of a long", "of 25,000 lines"]), (one_long_line, ["more characters)"])]
)
def test_what_is_cut_shows_its_end_and_how_long_it_is(story, words):
    for made in report(story()).values():
        assert all(word in made for word in words)
