"""`accelerate-nb test` tries the machine with real processes, and says what to mend."""

import json
import signal

import psutil
import pytest

from accelerate_nb.cli.commands import test as command
from accelerate_nb.cli.main import main
from accelerate_nb.launching.planning import preflight
from accelerate_nb.runtime.observability import self_test as in_a_worker
from tests.launching.test_self_test import hangs, with_step

CPU = ["test", "--cpu", "-n", "2"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_sound_machine_passes_every_check_a_line_each(capsys):
    assert main([*CPU, "--mixed-precision", "bf16"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.startswith("passed ") for line in lines)
    titles = ["Workers start", *(step.title for step in in_a_worker.STEPS)]
    assert [line[10:].partition(":")[0] for line in lines][-len(titles) :] == titles
    assert any("bf16: matrix products in bfloat16" in line for line in lines)
    assert last == f"All {len(lines)} checks passed."


def test_the_report_for_programs_holds_what_was_tried(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("num_processes: 2\nuse_cpu: true\n")
    assert main(["test", "--config_file", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert report["config_file"] == str(file)
    assert report["settings"] == {"num_processes": 2, "cpu": True}
    assert {item["state"] for item in report["checks"]} == {"passed"}
    assert report["checks"][-1].keys() == {"name", "title", "state", "text", "advice"}


def wrong(accelerator):
    raise ValueError("not what\nit should be")


def test_a_failure_reports_what_to_do_and_the_rest_is_left_out(monkeypatch, capsys):
    with_step(monkeypatch, "loader", wrong)
    # forked workers have this process's modules
    assert main([*CPU, "--start-method", "fork"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("failed"))
    assert "A split data loader: rank " in lines[at]
    assert lines[at + 1].strip() == "it should be"
    assert lines[at + 2].strip().startswith("to do: All output:")
    assert [line.split("  ")[0] for line in lines[at + 3 : -1]] == ["left out"] * 2
    assert lines[-1].startswith("1 of ")


def test_an_interrupt_ends_the_workers(monkeypatch, capsys):
    with_step(monkeypatch, "loader", hangs)
    show = command._show

    def interrupt_loader(check, **where):
        show(check, **where)
        if (check.name, check.state) == ("loader", "running"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "_show", interrupt_loader)
    # the workers are forked by this process itself; a supervisor of other tests may have new spare ones at any time
    before = {*psutil.Process().children()}
    assert main([*CPU, "--start-method", "fork", "--stop-grace-period", "0"]) == 130
    assert capsys.readouterr().out.endswith("Interrupted. No process of the test is left.\n")
    assert {*psutil.Process().children()} <= before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("distributed_type: MULTI_NPU", "requests NPUs"),
        ("mixed_precision: fp32", "mixed_precision should be"),
        ("a: [", "line 1"),
    ],
)
def test_a_configuration_that_cannot_be_is_a_failed_check(tmp_path, capsys, content, message):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    assert main(["test", "--config-file", str(file)]) == 1
    assert message in capsys.readouterr().out
    assert main(["test", "--config-file", str(file), "--json"]) == 1
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert (check["name"], check["state"]) == ("settings", "failed")


def test_nothing_is_started_where_nothing_could(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert main([*CPU, "--json"]) == 1
    states = {load["name"]: load["state"] for load in json.loads(capsys.readouterr().out)["checks"]}
    assert states["torch"] == "failed"
    assert "start" not in states
