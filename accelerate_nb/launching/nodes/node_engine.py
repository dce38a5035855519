"""Engines for several nodes, which place one agent on each and know nothing of what they do: on this machine, over ssh, and in an allocation of SLURM."""

import os
import re
import shlex
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.planning.placement import Host
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.worker_spec import LOOPBACK


@dataclass(frozen=True, slots=True)
class PlacedAgent:
    """An agent: its channel and, unless it was started on its own machine, the process here that is it or leads to it, and its output."""

    channel: Channel
    process: subprocess.Popen[bytes] | None = None
    output: int | None = None


@dataclass(frozen=True, slots=True)
class HandedMachine:
    """A machine on its way to another process: its name, the address at which it joined, and the descriptor of its socket."""

    name: str
    address: str
    descriptor: int


class NodeEngine(ABC):
    """A way to place agents; a frozen value, which is equal where agents that were placed before can serve again."""

    # the way to its agents, as a person knows it
    label: ClassVar[str]
    # whether workers have their node's own environment, rather than that of this process
    inherits_environment: ClassVar[bool] = True

    @abstractmethod
    def place(self, node: str) -> PlacedAgent:
        """Start the agent of a node; returns before it is there."""

    def replacement(self, node: str) -> str | None:
        """The node on which it has started the agent of a lost one, by itself, which may be the same; `None` where it starts none."""
        return None

    @abstractmethod
    def advice(self, node: str) -> str:
        """The command that shows a person why an agent can't be started there, as a sentence."""

    @contextmanager
    def handed_over(self, names: Sequence[str]) -> Iterator[tuple[HandedMachine, ...]]:
        """These nodes for another process, which inherits their descriptors within the block; none where it reaches them by itself."""
        yield ()


def agent_command(python: str) -> list[str]:
    """The command of an agent that speaks over its standard input and output."""
    return [python, "-m", "accelerate_nb.launching.node_agent.agent_process", "-"]


def start_command(words: Sequence[str]) -> PlacedAgent:
    """Start the command, in a session of its own; raises `OSError` where it is not there."""
    near, far = socket.socketpair()
    output = memory_file("accelerate_nb_agent")
    try:
        with far:
            process = subprocess.Popen(
                words, stdin=far.fileno(), stdout=far.fileno(), stderr=output, start_new_session=True
            )
    except OSError:
        near.close()
        os.close(output)
        raise
    return PlacedAgent(Channel(near, passes_descriptors=False, after_greeting=True), process, output)


@dataclass(frozen=True, slots=True)
class LocalNodes(NodeEngine):
    """Places every agent on this machine, in a session of its own, over a Unix socket."""

    label = "this machine"
    inherits_environment = False

    def place(self, node: str) -> PlacedAgent:
        """Start an agent."""
        near, far = socket.socketpair()
        output = memory_file("accelerate_nb_agent")
        with far:
            process = subprocess.Popen(
                [sys.executable, "-m", "accelerate_nb.launching.node_agent.agent_process", str(far.fileno()), LOOPBACK],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[far.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return PlacedAgent(Channel(near), process, output)

    def advice(self, node: str) -> str:
        """It is started as any other Python of this environment."""
        return f"Try `{sys.executable} -c 'import accelerate_nb'`"


# No terminal, no question that nobody could answer, and no wait for ever.
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclass(frozen=True, slots=True)
class SshNodes(NodeEngine):
    """Places an agent by `command HOST python -m ...`, which speaks over standard input and output; keys are the person's own."""

    command: tuple[str, ...]
    python: str

    label = "ssh"

    def place(self, node: str) -> PlacedAgent:
        """Start the agent of a host; raises `LaunchError` where there is no client."""
        try:
            return start_command([*self.command, *_OPTIONS, node, f"exec {shlex.join(agent_command(self.python))}"])
        except OSError as error:
            raise LaunchError(
                f"hosts were requested, and {self.command[0]!r}, which reaches them, can't be started: {error.strerror}. "
                "Install OpenSSH's client (on Debian: apt install openssh-client), or name yours as ssh_command."
            ) from None

    def advice(self, node: str) -> str:
        """The same command with another purpose."""
        words = [*self.command, node, shlex.join([self.python, "-c", "import accelerate_nb"])]
        return f"Try `{shlex.join(words)}` in a terminal, which has to end without a question or an error"


# A step beside those that run already, with all cores of its node. Without --unbuffered, srun holds back what ends in no newline.
_SRUN = ("srun", "--overlap", "--unbuffered", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--quiet")
_TIMEOUT = 30.0
# As in `2(x3),1`: three nodes with two tasks each, and one with one.
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class SlurmNodes(NodeEngine):
    """Places an agent by `srun --nodelist=NODE python -m ...` in the allocation `job`; every agent is a step of it."""

    job: str
    python: str

    label = "srun"

    def place(self, node: str) -> PlacedAgent:
        """Start the agent of a node; raises `LaunchError` where there is no srun."""
        try:
            return start_command(step_command(self.job, node, agent_command(self.python)))
        except OSError as error:
            raise LaunchError(
                f"engine='slurm' was requested, and srun can't be started: {error.strerror}. Run where SLURM's commands are in PATH."
            ) from None

    def advice(self, node: str) -> str:
        """The same step with another purpose."""
        step = step_command(self.job, node, [self.python, "-c", "import accelerate_nb"])
        return f"Try `{shlex.join(step)}` in a terminal"


def step_command(job: str, node: str, command: Sequence[str]) -> list[str]:
    """The command that runs another one as a step of a job, on one of its nodes."""
    return [*_SRUN, f"--jobid={job}", f"--nodelist={node}", *command]


def allocated_hosts(environment: Mapping[str, str], num_processes: int | None) -> tuple[str, tuple[Host, ...]]:
    """The number of the allocation that this process is in, and its nodes; raises `LaunchError` outside of one."""
    # where it was requested for a number of tasks, and no `num_processes` was, they are the nodes' slots
    job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        raise LaunchError(
            "engine='slurm' was requested outside of an allocation of SLURM (there is no SLURM_JOB_ID). Start the notebook or the "
            "command inside one: salloc --nodes=2 ..., or a batch script."
        )
    try:
        words = ["scontrol", "show", "hostnames", nodes]
        names = subprocess.run(words, check=True, capture_output=True, text=True, timeout=_TIMEOUT).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"engine='slurm' was requested on {nodes}, and scontrol can't name these nodes: {error}. Run where SLURM's commands are in "
            "PATH, and its controller can be reached."
        ) from None
    asks_for_tasks = num_processes is None and {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & environment.keys()
    slots = tasks_of(environment.get("SLURM_TASKS_PER_NODE", "")) if asks_for_tasks else []
    if len(slots) != len(names):
        return job, tuple(map(Host, names))
    return job, tuple(Host(name, tasks) for name, tasks in zip(names, slots, strict=True))


def used_and_others(config: LaunchingConfig, allocated: Sequence[Host]) -> tuple[tuple[Host, ...], tuple[Host, ...]]:
    """The nodes of an allocation that a run uses, and the others; pure. Raises `LaunchError` where they are too few or too many."""
    # as with `srun`: the first `num_nodes`, without it all, but never more nodes than there are processes
    count, processes = config.num_nodes, config.num_processes
    if count > len(allocated):
        raise LaunchError(
            f"num_nodes={count} was requested, and the allocation has {len(allocated)} nodes "
            f"({', '.join(host.name for host in allocated)}). Pass num_nodes={len(allocated)} at most, or request more: "
            f"salloc --nodes={count}."
        )
    if processes is not None and processes < count:
        raise LaunchError(
            f"num_processes={processes} was requested on num_nodes={count} nodes of the allocation, each of which runs one at least. "
            f"Pass num_processes={count} or more, or fewer nodes."
        )
    if count == 1:
        count = len(allocated) if processes is None else min(processes, len(allocated))
    return tuple(allocated[:count]), tuple(allocated[count:])


def tasks_of(text: str) -> list[int]:
    """The tasks of each node, as SLURM_TASKS_PER_NODE has them: `2(x3),1` is 2, 2, 2, 1."""
    return [int(tasks) for tasks, times in _TASKS.findall(text) for _ in range(int(times or 1))]
