"""`accelerate-nb test`: this machine and these settings, tried with real processes."""

import argparse
import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

from accelerate_nb.cli.parser import add_config_file, add_settings, given_settings
from accelerate_nb.config.formats import plain
from accelerate_nb.config.hf_files import find, read
from accelerate_nb.config.run_config import RunConfig, all_settings, differing, resolve
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.events.event_types import CheckResult
from accelerate_nb.notebook.display.text_output import LabelledLine, LineStyle, TextSink

_EXAMPLES = """examples:
  accelerate-nb test                                   with the settings that every launch begins with
  accelerate-nb test -n 2 --cpu                        two processes on the CPU
  accelerate-nb test --tpu                             all chips of this machine's TPU
  accelerate-nb test --config_file cluster.yaml --json
"""
# Where one of these fails, no worker could start.
_NEEDED = {"settings", "torch", "folder", "port"}
_MEANINGS: dict[str, LineStyle] = {"passed": "finished", "failed": "failed", "left out": "bar"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = (
        "Try this machine and these settings for real: variables, shared memory, devices, the process group,\n"
        "what processes exchange, data loaders, mixed precision, and a short training compared with that of\n"
        "one process. The exit code is 0 where all checks passed, else 1."
    )
    parser.epilog = _EXAMPLES
    add_config_file(parser, "The configuration file, in place of the default one; '' for none.")
    parser.add_argument("--json", action="store_true", help="Write JSON, once all is over.")
    parser.add_argument("--tpu", action="store_true", help="Try all chips of this machine's TPU; as --engine xla.")
    add_settings(parser, all_settings())


def run(arguments: argparse.Namespace) -> int:
    """Make all checks, and show them while they are made."""
    given = given_settings(arguments, all_settings())
    if arguments.tpu:
        given = {"engine": "xla", **given}
    # not before the arguments are read: a help is to come at once
    from accelerate_nb.launching.planning import preflight
    from accelerate_nb.launching.self_test import SelfTest
    from accelerate_nb.notebook.display.text import standard_sink

    sink = None if arguments.json else standard_sink()
    # every check so far, with its last state
    checks: dict[str, CheckResult] = {}
    take = partial(_show, found=checks, sink=sink)
    path: Path | None = None
    config: RunConfig | None = None
    try:
        path = find(os.environ, arguments.config_file)
        config = resolve(given, os.environ, {} if path is None else read(path))
    except AccelerateNbError as error:
        take(CheckResult("settings", "The settings", "failed", str(error)))
    try:
        if config is not None:
            found = preflight.run_checks(config, os.environ, take)
            if not any(item.state == "failed" and item.name in _NEEDED for item in found):
                SelfTest(config, take).run()
    except KeyboardInterrupt:
        _end(sink, "Interrupted. No process of the test is left.")
        raise
    # nothing failed, and nothing was left unchecked
    states = [item.state for item in checks.values()]
    passed = all(state == "passed" for state in states)
    if arguments.json:
        settings = {} if config is None else differing(config)
        report = {
            "passed": passed,
            "config_file": None if path is None else str(path),
            "settings": {name: plain(value) for name, value in settings.items()},
            "checks": [asdict(item) for item in checks.values()],
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
    elif passed:
        _end(sink, f"All {len(states)} checks passed.")
    else:
        left = f", {states.count('left out')} left out" if "left out" in states else ""
        _end(sink, f"{states.count('failed')} of {len(states)} checks failed{left}.")
    return 0 if passed else 1


def _show(check: CheckResult, found: dict[str, CheckResult], sink: TextSink | None) -> None:
    """Keep the news of a check; a sink shows those that are over, and where it redraws those to come below them."""
    is_done = check.state in {"passed", "failed", "left out"} and found.get(check.name) != check
    found[check.name] = check
    if sink is not None:
        sink.write(_lines(check) if is_done else [])
        waiting = [item for item in found.values() if item.state in {"running", "waiting"}]
        sink.show_open([line.label + line.text for item in waiting for line in _lines(item)[:1]])


def _end(sink: TextSink | None, text: str) -> None:
    """Show a text, which nothing follows."""
    if sink is not None:
        sink.show_open(())
        sink.write([LabelledLine("stdout", text)])


def _lines(check: CheckResult) -> list[LabelledLine]:
    """A check in a line, and below it what it says beside its title."""
    lead = "to do: " if check.state == "failed" else "note: "
    lines = f"{check.title}: {check.text}".splitlines() if check.text else [check.title]
    first, *more = [*lines, *([lead + check.advice] if check.advice else [])]
    head = LabelledLine("stdout", first, _MEANINGS.get(check.state, ""), f"{check.state:<8}  ")
    return [head, *(LabelledLine("stdout", f"          {line}") for line in more)]
