"""`accelerate-nb runs`: what ran is listed, found by whatever name it goes by, and shown."""

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from contextlib import closing

import pytest

from accelerate_nb import launch
from accelerate_nb.cli.main import main
from accelerate_nb.events.event_types import Failure, Metric, Restart, StateChange
from accelerate_nb.events.run_folder import RunRecorder
from accelerate_nb.events.run_reader import chosen_of, kept_runs
from accelerate_nb.notebook.runs import runs


def keep(parent, name, started, *, state="finished", error=None, output=b"hello\n", number=0, **more):
    """A run of two ranks that a launch has left."""
    with closing(RunRecorder(parent / f"2024-01-01_{number or int(started):06}_{name}")) as record:
        record.event(StateChange(None, "running", started))
        for rank in (0, 1):
            for step in range(10):
                record.event(Metric(rank, "loss", 1 / (step + 1), step, started + step))
            record.output(rank, output)
            record.event(StateChange(rank, state, started + 61))
        if error:
            record.event(Failure(1, "ValueError", error, f"the traceback of {error}", started + 60))
        ended = None if state == "running" else started + 61
        record.event(StateChange(None, state, started + 61))
        facts = {"name": name, "why": "2 on the CPU", "state": state, "started": started, "ended": ended, "ranks": 2}
        record.status(**facts, **more, error=error and f"rank 1 stopped with ValueError: {error}\n\nmore")
        return record.folder


@pytest.fixture
def parent(tmp_path):
    runs = tmp_path / "runs"
    keep(runs, "train", 1.0)
    keep(runs, "evaluate", 2.0, state="failed", error="bad batch")
    keep(runs, "train", 3.0, state="running", output=b"".join(b"line %d\n" % number for number in range(30)))
    return runs


@pytest.fixture
def runs_command(parent, capsys):
    def run_command(*words):
        code = main(["runs", *words, "--folder", str(parent)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_command


def test_runs_are_compared_by_their_curves_metrics_and_the_settings_that_differ(tmp_path):
    same = {"num_processes": 2, "timeout": 60.0}
    loss = {"metrics": {"acc": 0.9, "loss": 0.25}, "curve": ["loss", "█▅▂▁"]}
    keep(tmp_path, "train", 1.0, settings=same)
    keep(tmp_path, "train", 2.0, settings={**same, "num_processes": 4, "mixed_precision": "bf16"}, **loss)
    table = runs(tmp_path)
    head, *rows = [re.split(r"\s{2,}", row) for row in repr(table).splitlines()]
    assert head[-3:] == ["metrics", "curve", "settings"]
    assert rows[0][-3:] == ["loss 0.25, acc 0.9", "█▅▂▁", "mixed_precision=bf16"]
    assert "timeout" not in repr(table)
    assert ">█▅▂▁</td>" in table._repr_html_()
    # alone, a run differs from none
    assert "bf16" not in repr(table[:1])


def test_a_run_without_a_name_is_named_by_the_arguments_in_which_runs_of_its_function_differ(tmp_path, capsys):
    arguments = {"lr": "0.1", "epochs": "3", "model": "'resnet'", "config": "{'depth': 2}"}
    others = {**arguments, "lr": "0.30000000000000004", "model": "'vit'"}
    keep(tmp_path, "train", 1.0, function="train", arguments=arguments)
    keep(tmp_path, "train", 2.0, function="train", arguments=others)
    keep(tmp_path, "best", 3.0, function="train", arguments=arguments, settings={"name": "best", "tags": "a,b c"})
    keep(tmp_path, "evaluate", 4.0, function="evaluate", arguments={"lr": "7"})
    keep(tmp_path, "train", 0.5)  # of an earlier version
    table = runs(tmp_path)
    names = ["evaluate", "best", "train lr=0.3 model=vit", "train lr=0.1 model=resnet", "train"]
    assert [run.name for run in table] == names
    head, *rows = [re.split(r"\s{2,}", row) for row in repr(table).splitlines()]
    assert head == ["", "when", "name", "state", "ranks", "time", "tags", "lr", "model"]
    assert rows[1][-3:] == ["a, b c", "0.1", "resnet"]
    assert rows[2][-2:] == ["0.3", "vit"]
    assert rows[0][-1] == "01:01"  # no other run of its function
    assert main(["runs", "compare", "best", "train lr=0.3 model=vit", "--folder", str(tmp_path)]) == 0
    head, best, _, *_ = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", head)[:3] == ["", "run", "tags"]
    assert best.startswith("A  best                    a, b c  ")
    assert main(["runs", "show", "best", "--folder", str(tmp_path)]) == 0
    assert re.match(r"best  ✔ finished  .*, tags a, b c$", capsys.readouterr().out.splitlines()[0])


def test_a_table_shows_the_newest_runs_in_a_line_each_and_unfolds_the_others(tmp_path):
    now = time.time()
    for number in range(17):
        name = f"run_{number}" + "_long" * number
        keep(tmp_path, name, now - 60 * number - 5, number=number + 1)
    table = runs(tmp_path)
    made = table._repr_html_()
    newest, others = made.split("<details>")
    assert (newest.count("<tr data-run"), others.count("<tr data-run")) == (15, 2)
    assert '<summary style="cursor:pointer">show all 17 runs</summary>' in others
    assert ">12 min ago</td>" in newest
    assert f' title="{time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - 725))}"' in newest
    name = "run_9" + "_long" * 9
    assert f'<td data-name title="{name}">{name}</td>' in newest
    # columns of both parts are equally wide
    assert len(set(re.findall("<colgroup>.*?</colgroup>", made))) == 1
    # a run is opened between two parts: the first ends with it, also where it was folded
    for opened, is_folded in ((3, False), (15, True)):
        above, below = table.html_parts("id", opened)
        numbers = [[int(number) for number in re.findall(r'<tr data-run="(\d+)"', part)] for part in (above, below)]
        assert numbers == [[*range(opened + 1)], [*range(opened + 1, 17)]]
        assert ("<details open>" in above, "<details>" in below) == (is_folded, not is_folded)
        assert ("<th>" in above, "<th>" in below) == (True, False)


def test_runs_are_listed_newest_first_with_their_states_and_first_errors(runs_command):
    code, out, _ = runs_command()
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    expected = [("1", "train", "●", "running"), ("2", "evaluate", "✖", "failed"), ("3", "train", "✔", "finished")]
    assert [(row[0], *row[3:6]) for row in rows[1:]] == expected
    assert "  01:01  " in out.splitlines()[2]
    assert out.splitlines()[2].endswith("  rank 1 stopped with ValueError: bad batch")
    # the list for programs holds the same
    listed = json.loads(runs_command("list", "--json")[1])
    numbered = [(str(item["number"]), item["name"], item["state"]) for item in listed]
    assert numbered == [(row[0], row[3], row[5]) for row in rows[1:]]
    assert all(os.path.isdir(item["folder"]) for item in listed)


def test_restarts_are_in_the_list_and_in_the_report(parent, runs_command):
    with closing(RunRecorder(parent / "2024-01-01_000009_again")) as record:
        record.event(Restart(1, 3, "rank 1 ended with SIGKILL", 0.1, 4.0))
        record.status(name="again", why="2 on the CPU", state="finished", started=9.0, ended=10.0, ranks=2, restarts=1)
    assert "✔ finished, 1 restart  2" in runs_command()[1]
    assert "restart 1 of 3, after 0.1 s: rank 1 ended with SIGKILL" in runs_command("show", "again")[1]
    assert json.loads(runs_command("list", "--json")[1])[0]["restarts"] == 1


def test_the_newest_are_listed_and_all_where_that_is_requested(runs_command, parent):
    for number in range(30):
        keep(parent, "many", 10.0 + number)
    assert runs_command()[1].splitlines()[-1] == "… and 18 more; --all lists them"
    assert len(runs_command("--all")[1].splitlines()) == 34


def test_a_machine_on_which_nothing_has_run_reports_it(tmp_path, capsys):
    assert main(["runs", "--folder", str(tmp_path / "none")]) == 0
    assert "There are no runs in" in capsys.readouterr().out
    assert main(["runs", "show", "--folder", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("last", ["2024-01-01_000003_train"]),
        ("1", ["2024-01-01_000003_train"]),
        ("3", ["2024-01-01_000001_train"]),
        ("evaluate", ["2024-01-01_000002_evaluate"]),
        ("eval", ["2024-01-01_000002_evaluate"]),
        ("2024-01-01_000001_train", ["2024-01-01_000001_train"]),
        ("2024-01-01_000002", ["2024-01-01_000002_evaluate"]),
        ("train", ["2024-01-01_000003_train", "2024-01-01_000001_train"]),
        ("4", []),
        ("nothing", []),
    ],
)
def test_a_run_goes_by_a_number_a_name_or_the_beginning_of_one(parent, word, names):
    assert [item.folder.name for item in chosen_of(word, kept_runs(parent))] == names


def test_a_name_that_several_runs_have_is_answered_with_their_numbers(runs_command):
    code, out, err = runs_command("path", "train")
    assert (code, out) == (2, "")
    for words in ("may mean any of 2 runs", "1  2024-01-01_000003_train", "3  2024-01-01_000001_train"):
        assert words in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "evaluat1"], "evaluate"),
        (["logs", "--rank", "2"], "ranks 0 to 1"),
        (["show", "--html", "/no/where.html"], "/no/where.html, which can't be done: No such file or directory"),
    ],
)
def test_a_wrong_name_rank_or_file_is_answered_in_a_few_words(runs_command, words, message):
    code, _, err = runs_command(*words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_runs_folder_is_printed_and_is_a_name_of_it_too(runs_command, parent):
    folder = runs_command("path", "2")[1].strip()
    assert folder == str(parent / "2024-01-01_000002_evaluate")
    assert main(["runs", "path", folder]) == 0


# ------------------------------------------------------------------------------------------------------------------- logs


def test_the_last_lines_of_all_ranks_or_of_one_are_shown(runs_command):
    newest = [f"[{rank}] line {number}" for rank in (0, 1) for number in range(10, 30)]
    assert runs_command("logs")[1].splitlines() == newest
    assert runs_command("logs", "1", "--rank", "1", "--lines", "2")[1] == "line 28\nline 29\n"


def test_a_log_is_shown_without_what_would_disturb_a_reader(runs_command, parent):
    keep(parent, "noisy", 9.0, output=b"\x1b[31mred\x1b[0m\x1b[2K\n10%\r90%\n\xff\n")
    assert runs_command("logs", "--rank", "0")[1] == "red\n90%\n\\xff\n"


def test_a_log_that_is_followed_goes_on_until_the_run_is_over(parent):
    with closing(RunRecorder(parent / "2024-01-01_000009_long")) as record:
        facts = {"name": "long", "started": 9.0, "ranks": 1}
        record.status(**facts, state="running")
        record.output(0, b"one\n")
        command = [sys.executable, "-m", "accelerate_nb", "runs", "logs", "long", "--follow", "--folder", str(parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "one\n"
            record.output(0, b"two\n")
            assert process.stdout.readline() == "two\n"
            record.output(0, b"three\n")
            record.status(**facts, state="finished", ended=10.0)
            assert process.stdout.read() == "three\n"
            assert process.wait(60) == 0


def test_a_reader_that_has_seen_enough_ends_the_command_without_a_word(parent):
    keep(parent, "long", 9.0, output=b"a line of some length\n" * 100_000)
    command = f"{sys.executable} -m accelerate_nb runs logs long --lines 100000 --folder {parent} | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (141, "[0] a line of some length\n", "")


# ----------------------------------------------------------------------------------------------------------------- report


def test_a_report_shows_what_became_of_the_run(runs_command):
    shown = runs_command("show", "evaluate")[1]
    head = ("evaluate  ✖ failed  01:01, 2 lines", "2 on the CPU", "rank 1 stopped with ValueError: bad batch")
    for essential in (*head, "the traceback of bad batch", "min 0.1  max 1", "loss  █▄", "hello", "All output: "):
        assert essential in shown


def test_a_report_that_is_a_page_needs_nothing_else(runs_command, tmp_path):
    page = tmp_path / "report.html"
    assert runs_command("show", "evaluate", "--html", str(page)) == (0, f"{page}\n", "")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "the traceback of bad batch" in text
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_a_run_whose_launcher_died_is_distinguished_from_one_that_runs(runs_command, parent):
    folder = keep(parent, "killed", 9.0, state="running")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "process_began": 0.0}))
    assert "✖ lost (was running)" in runs_command()[1].splitlines()[1]
    assert "has gone, and the run's end was not recorded" in runs_command("show")[1]


def test_of_a_log_with_gaps_standard_error_names_where_the_whole_is(runs_command, parent):
    gap = "… 3.0 MB left out here; whole log: node b, /logs/rank_0.log\n"
    keep(parent, "far", 4.0, output=f"first\n{gap}last\n".encode())
    _, out, error = runs_command("logs", "far", "--rank", "0")
    assert out == f"first\n{gap}last\n"
    assert "names the node and the file" in error
    # no gap among these
    assert runs_command("logs", "far", "--rank", "1", "--lines", "1") == (0, "last\n", "")


EVIL = "a\x1b]0;title\x07\u202eb\n\x9b2Jc\r\x00"
JUNK = [None, 0, -1, 1.5, math.nan, math.inf, 10**400, 10**9, True, "", EVIL, "0" * 10_000, [], {}, [[[]]], {"a": None}]


def logs_everything(evil):
    from accelerate_nb import Accelerator

    accelerator = Accelerator(cpu=True)
    for step in range(3):
        accelerator.log({evil: 1.0 / (step + 1), "loss": float(step)}, step=step)
        print(evil)
    raise ValueError(evil)


def damaged(chance, content):
    """The content of a file with something in it that nobody has written."""
    lines = content.split(b"\n")
    for _ in range(chance.choice([1, 3])):
        index = chance.randrange(len(lines))
        values = json.loads(lines[index]) if lines[index].startswith(b"{") and lines[index].endswith(b"}") else None
        if values and chance.random() < 0.9:
            depth = chance.choice([20, 200])
            changed = chance.choice([*JUNK, json.loads("[" * depth + "]" * depth)])
            values = {**values, chance.choice([*values]): changed} if chance.random() < 0.9 else changed
            lines[index] = json.dumps(values).encode()
        else:
            line = lines[index]
            cut = line[: chance.randrange(len(line) + 1)]
            lines[index] = chance.choice([chance.randbytes(40), b"[" * 100_000, b"{" * 900, cut, b"\x1b]0;x\x07\xff"])
    return b"\n".join(lines)


@pytest.mark.slow
def test_whatever_is_in_a_run_s_folder_is_shown_without_a_traceback_or_what_acts_on_a_terminal(tmp_path, capsys):
    logs_everything.__name__ = logs_everything.__qualname__ = EVIL
    run = launch(logs_everything, (EVIL,), engine="inline", cpu=True, panel="off", folder=str(tmp_path))
    with pytest.raises(ValueError, match="a"):
        run.wait()
    capsys.readouterr()
    whole = {path: path.read_bytes().strip() for path in run.folder.iterdir() if path.is_file()}
    facts = json.loads(whole[run.folder / "status.json"])
    facts |= {"why": EVIL, "curve": [EVIL, EVIL], "progress": [EVIL, 1, 2], "arguments": {EVIL: EVIL}}
    facts["settings"] |= {"tags": EVIL, "name": EVIL}
    whole[run.folder / "status.json"] = json.dumps(facts).encode()
    other, chance = keep(tmp_path, "other", 1.0), random.Random(7)
    for number in range(60):
        for path, content in whole.items():
            path.write_bytes(content if number == 0 or chance.random() < 0.5 else damaged(chance, content))
        for words in (
            *(["list"], ["list", "--json"], ["show", run.folder], ["logs", run.folder], ["attach", run.folder]),
            *(["compare", run.folder, other], ["show", run.folder, "--html", tmp_path / "page.html"]),
        ):
            main(["runs", *map(str, words), "--folder", str(tmp_path)])
        shown = "".join(capsys.readouterr()) + (tmp_path / "page.html").read_text() + runs(tmp_path)._repr_html_()
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)


def test_events_that_can_not_be_read_are_counted(parent, runs_command):
    folder = keep(parent, "odd", 4.0)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"type": "metric", "rank": "0", "name": "loss", "value": 1, "step": 1, "time": 1}\n[\n')
        restart = '"attempt": 1, "max_restarts": 1, "reason": "", "delay": 1, "time": 1, "ranks": 9e99'
        file.write(f'{{"type": "of later"}}\n{{"type": "restart", {restart}}}\n')
    assert "4 events of its folder can't be read" in runs_command("show", "odd")[1]
