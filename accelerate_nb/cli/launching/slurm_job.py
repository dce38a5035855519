"""A launch as a job of SLURM: the batch script, which is written, printed or submitted."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate_nb.cli.launching.request import LaunchRequest
from accelerate_nb.config.environment import runs_folder
from accelerate_nb.config.formats import flags
from accelerate_nb.config.run_config import differing
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.reports.text_format import counted

_TIMEOUT = 60.0
# The variable of a job whose run others attach to.
IN_JOB = "ACCELERATE_NB_IN_JOB"
# How long before its time limit a job is told, in seconds: at most this, and at most a part of the limit.
_LONGEST_NOTICE, _PART = 120, 4
# Minutes, minutes:seconds, hours:minutes:seconds, and days-hours with either.
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
# Settings that a job has its own of.
_NOT_IN_JOBS = {"engine", "folder", "detach", "panel", "report", "node_python"}
# Options of sbatch that are flags here.
_OURS = ("nodes", "gpus-per-node", "time", "partition")

# The launcher gets SIGTERM, at which all ranks stop after the same step and may save. A shell that waits is woken by each signal that it
# traps, so it waits again. Exit code 75: they have stopped so.
_SCRIPT = """\
#!/bin/bash
{options}

{variables}
export {in_job}=yes
{command} &
launch=$!
at_limit=
trap 'signalled=yes; at_limit=yes; kill -TERM $launch' USR1
trap 'signalled=yes; kill -TERM $launch' TERM
signalled=yes
while [ "$signalled" ]; do
  signalled=
  wait $launch
  code=$?
done
{after}exit $code
"""
_REQUEUE = """\
if [ "$at_limit" ] && [ $code -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
"""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The request of a job; `more` are options of `sbatch` by their long names."""

    # with `requeue` a job that its time limit stopped, and that has saved, goes into the queue again

    nodes: int = 1
    gpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    more: Mapping[str, str] | None = None
    requeue: bool = False

    def script(
        self, command: Sequence[str], what: Sequence[str], *, name: str, folder: Path, variables: Mapping[str, str]
    ) -> str:
        """The batch script that launches `what` by `command`, in this process's folder and with these variables."""
        # the log of job 7 is `folder/slurm_7.log`, and the runs of that job are in `folder/slurm_7`
        options = {
            "job-name": name,
            "nodes": str(self.nodes),
            "gpus-per-node": None if self.gpus_per_node is None else str(self.gpus_per_node),
            "time": self.time,
            "partition": self.partition,
            "chdir": str(Path.cwd()),
            "output": f"{folder}/slurm_%j.log",
            "open-mode": "append",
            "signal": f"B:USR1@{notice(self.time)}",
            "requeue" if self.requeue else "no-requeue": "",
            **(self.more or {}),
        }
        given = {key: value for key, value in options.items() if value is not None}
        words = (shlex.quote(f"--{key}={value}" if value else f"--{key}") for key, value in given.items())
        runs = f"{shlex.quote(str(folder))}/slurm_$SLURM_JOB_ID"
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH {word}" for word in words),
            variables="\n".join(f"export {key}={shlex.quote(value)}" for key, value in variables.items()),
            command=f"{shlex.join(command)} --folder {runs} {shlex.join(what)}",
            after=_REQUEUE if self.requeue else "",
            in_job=IN_JOB,
        )


def submit(script: str) -> str:
    """The number of the job that a script was submitted as; raises `LaunchError` where SLURM refuses it."""
    import subprocess

    try:
        words = ["sbatch", "--parsable"]
        done = subprocess.run(words, input=script, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        raise LaunchError(
            f"A job of SLURM was to be submitted, and sbatch refused it: {error.stderr.strip()}"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"A job of SLURM was to be submitted, and sbatch can't be run: {error}. Submit where SLURM's commands are in PATH, or print the "
            "script with --dry-run."
        ) from None
    return done.stdout.strip().partition(";")[0]


def notice(time: str | None) -> int:
    """The seconds before a time limit at which a job is told: 120 of `2:00:00`, 60 of `4`, which are minutes."""
    if time is None:
        return _LONGEST_NOTICE
    found = _TIME.fullmatch(time)
    if found is None:
        raise ConfigurationError(
            f"--time {time} was given, which is no time of SLURM. Write minutes, or hours:minutes:seconds."
        )
    days, *parts = (None if part is None else int(part) for part in found.groups())
    given = [part for part in parts if part is not None]
    # after days come hours; alone, one number is minutes, two are minutes and seconds
    units = [3600, 60, 1] if days is not None or len(given) == 3 else [60, 1]
    seconds = (days or 0) * 86400 + sum(part * unit for part, unit in zip(given, units, strict=False))
    return max(1, min(_LONGEST_NOTICE, seconds // _PART))


def more_options(entries: Sequence[str]) -> dict[str, str]:
    """Options of `sbatch` as they are given, `KEY=VALUE` or a `KEY` alone; an error for those that are flags already."""
    found: dict[str, str] = {}
    for entry in entries:
        key, _, value = entry.lstrip("-").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or "\n" in value:
            raise ConfigurationError(
                f"--sbatch {entry!r} was given, which is no option of sbatch. Write KEY=VALUE, as account=lab."
            )
        if key in _OURS:
            raise ConfigurationError(
                f"--sbatch {entry} was given, and --{key} is a flag of its own. Pass --{key} {value}."
            )
        found[key] = value
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a job."""
    group = parser.add_argument_group("A job of SLURM")
    group.add_argument(
        "--slurm", action="store_true", help="Submit a batch job that launches it on all of its nodes, and return."
    )
    group.add_argument("--nodes", metavar="N", help="The number of nodes of the job; 1 without it.")
    group.add_argument(*("--gpus-per-node", "--gpus_per_node"), metavar="N", help="The number of GPUs of each node.")
    group.add_argument("--time", metavar="LIMIT", help="The time limit, as hours:minutes:seconds or minutes.")
    group.add_argument("--partition", metavar="NAME", help="The partition of the cluster.")
    group.add_argument(
        "--sbatch",
        metavar="KEY=VALUE",
        action="append",
        help="Any other option of sbatch: account=lab; may be repeated.",
    )
    group.add_argument(
        "--requeue",
        action="store_true",
        help="Put the job into the queue again where its time limit has stopped it after a step that all ranks share.",
    )


def requested_job(arguments: argparse.Namespace) -> SlurmJob | None:
    """The requested job; `None` where none is. Raises `ConfigurationError` where its flags are wrong, or given without `--slurm`."""
    given = {
        name: getattr(arguments, name) for name in ("nodes", "gpus_per_node", "time", "partition", "sbatch", "requeue")
    }
    if not arguments.slurm:
        if first := next((name for name, value in given.items() if value), None):
            flag = first.replace("_", "-")
            raise ConfigurationError(
                f"--{flag} was given, which is of a job of SLURM. Add --slurm to submit one, or leave it out."
            )
        return None
    nodes, gpus = _count("nodes", arguments.nodes), _count("gpus-per-node", arguments.gpus_per_node)
    more = more_options(arguments.sbatch or ())
    job = SlurmJob(nodes or 1, gpus, arguments.time, arguments.partition, more, arguments.requeue)
    _ = notice(job.time)
    return job


def launch_job(job: SlurmJob, request: LaunchRequest, what: Sequence[str], *, is_dry: bool) -> int:
    """Submit the launch of `what` as a job, or print its script; gives the exit code."""
    launching = request.config.launching
    if (
        launching.engine not in {"auto", "slurm"}
        or launching.names_hosts != (launching.engine == "slurm")
        or launching.num_nodes > job.nodes
    ):
        raise ConfigurationError(
            "--slurm was given with other machines, another engine, or more machines than the job has nodes. The job's own nodes run it: "
            "leave the others out, and name their number with --nodes."
        )
    if launching.max_restarts and launching.num_nodes > 1:
        # SLURM ends a job that has lost a node, unless it was told otherwise
        job = replace(job, more={"no-kill": "", **(job.more or {})})
    settings = {name: value for name, value in differing(request.config).items() if name not in _NOT_IN_JOBS}
    command = [launching.node_python or sys.executable, "-m", "accelerate_nb.cli.main", "launch"]
    command += ["--engine", "slurm", "--config-file=", *flags(settings)]
    command += ["--quiet"] if request.quiet else []
    command += [] if request.only_ranks is None else ["--only-rank", ",".join(map(str, request.only_ranks))]
    folder = runs_folder(os.environ, launching.folder).absolute()
    name = Path(next(word for word in what if not word.startswith("-"))).name
    script = job.script(command, what, name=name, folder=folder, variables=request.variables)
    if is_dry:
        print(script, end="")
        return 0
    request.warn_of_unused_flags()
    folder.mkdir(parents=True, exist_ok=True)
    number = submit(script)
    runs = shlex.quote(str(folder / f"slurm_{number}"))
    print(f"Job {number} of SLURM launches {name} on {counted(job.nodes, 'node')}.")
    print(f"  squeue --job {number}    whether it has begun")
    print(f"  accelerate-nb runs attach --folder {runs}    its output, live, once it has begun")
    print(f"  scancel --batch --signal=TERM {number}    stop it after a step that all ranks share; twice: at once")
    print(f"All that it prints: {folder}/slurm_{number}.log")
    return 0


def _count(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise ConfigurationError(f"--{flag} {text} was given, and a whole number, at least 1, is needed.")
    return int(text)
