"""Agents on nodes: the engines that place one on each, the connection to each agent, and those that stay for the next launch."""

import atexit
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import ClassVar

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.launching.node_agent.node_network import REPLY_TIMEOUT, check_reach, endpoint_of, of_all
from accelerate_nb.launching.node_agent.remote_agent import ChannelReader, RemoteAgent
from accelerate_nb.launching.planning.placement import Host
from accelerate_nb.transport.channel import Channel, Reply, blocking_pair, is_ready
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.messages import ListenToPeers, Message, NodeFacts, PeerEndpoint, QueryNode
from accelerate_nb.transport.worker_spec import LOOPBACK, NetworkAddress, python_command, python_path

# How long a new agent may take until it replies for the first time, in seconds.
_START_TIMEOUT = 60.0
# Facts that are so old need not be asked for again.
_FRESH = 2.0
_LAST_OUTPUT = 2000
# How long agents may take until they have ended, in seconds.
END_TIMEOUT = 2.0


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
        """Start the agent of a node; returns before it is there, and raises `LaunchError` where it can't be started."""

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


def start_command(words: Sequence[str], environment: Mapping[str, str] | None = None) -> PlacedAgent:
    """Start the command, in a session of its own; raises `OSError` where it is not there."""
    near, far = blocking_pair()
    output, end = memory_file("accelerate_nb_agent"), far.fileno()
    try:
        with far:
            process = subprocess.Popen(
                words, stdin=end, stdout=end, stderr=output, start_new_session=True, env=environment
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
        near, far = blocking_pair()
        output = memory_file("accelerate_nb_agent")
        with far:
            process = subprocess.Popen(
                [*python_command("accelerate_nb.launching.node_agent.agent_process"), str(far.fileno()), LOOPBACK],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[far.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
        return PlacedAgent(Channel(near), process, output)

    def advice(self, node: str) -> str:
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
        try:
            return start_command([*self.command, *_OPTIONS, node, f"exec {shlex.join(agent_command(self.python))}"])
        except OSError as error:
            raise LaunchError(
                f"hosts were requested, and {self.command[0]!r}, which reaches them, can't be started: {error.strerror}. "
                "Install OpenSSH's client (on Debian: apt install openssh-client), or name yours as ssh_command."
            ) from None

    def advice(self, node: str) -> str:
        words = [*self.command, node, shlex.join([self.python, "-c", "import accelerate_nb"])]
        return f"Try `{shlex.join(words)}` in a terminal, which has to end without a question or an error"


# A step beside those that run already, with all cores of its node. Without --unbuffered, srun holds back what ends in no newline.
_SRUN = ("srun", "--overlap", "--unbuffered", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--quiet")
_TIMEOUT = 30.0
# As in `2(x3),1`: three nodes with two tasks each, and one with one.
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# Of `scontrol show job --details`: nodes and what they have, as in `Nodes=a[1-2] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1)`.
_GRES = re.compile(r"^ *Nodes=(\S+) .*GRES=(\S*)", re.MULTILINE)
_NODE_LIST = re.compile(r"^ *NodeList=(\S+)", re.MULTILINE)
_GPUS = re.compile(r"gpu:(?:[^:,(]+:)?(\d+)")
# Where a job's GPUs were requested in all or for a task, not for a node: a step takes that over, unless it requests others.
_OF_GPUS = {"SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU"}
# With these, srun would give an agent what a task has, name the task in each line, or keep the environment from it.
_OF_TASKS = {*_OF_GPUS, "SRUN_CPUS_PER_TASK", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_LABELIO", "SLURM_EXPORT_ENV"}


@dataclass(frozen=True, slots=True)
class SlurmNodes(NodeEngine):
    """Places an agent by `srun --nodelist=NODE python -m ...` in the allocation `job`; every agent is a step of it."""

    job: str
    python: str

    label = "srun"

    def place(self, node: str) -> PlacedAgent:
        environment = {name: value for name, value in os.environ.items() if name not in _OF_TASKS}
        try:
            return start_command(self._step(node, agent_command(self.python)), environment)
        except OSError as error:
            raise LaunchError(
                f"engine='slurm' was requested, and srun can't be started: {error.strerror}. Run where SLURM's commands are in PATH."
            ) from None

    def advice(self, node: str) -> str:
        return f"Try `{shlex.join(self._step(node, [self.python, '-c', 'import accelerate_nb']))}` in a terminal"

    def _step(self, node: str, command: Sequence[str]) -> list[str]:
        options = [f"--gpus={gpus_of_nodes(self.job).get(node, 0)}"] if _OF_GPUS & os.environ.keys() else []
        return step_command(self.job, node, command, *options)


def step_command(job: str, node: str, command: Sequence[str], *options: str) -> list[str]:
    """The command that runs another one as a step of a job, on one of its nodes."""
    return [*_SRUN, f"--jobid={job}", f"--nodelist={node}", *options, *command]


@cache
def gpus_of_nodes(job: str) -> dict[str, int]:
    """The number of GPUs that a job has on each of its nodes; raises `LaunchError`."""
    found = _GRES.findall(_facts_of_job(job))
    counts = ((nodes, sum(map(int, _GPUS.findall(entries)))) for nodes, entries in found)
    return {name: count for nodes, count in counts for name in _scontrol("hostnames", nodes).split()}


def _facts_of_job(job: str) -> str:
    # by its number alone the other tasks of its array may be shown too
    blocks = _scontrol("job", "--details", job).split("\n\n")
    return next((block for block in blocks if block.startswith(f"JobId={job} ")), "")


def _scontrol(*words: str) -> str:
    try:
        command = ["scontrol", "show", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        raise LaunchError(
            f"engine='slurm' was requested, and SLURM can't show {words[-1]}: {reason}. Run where its commands are in PATH, and its "
            "controller can be reached."
        ) from None


def allocated_hosts(environment: Mapping[str, str], num_processes: int | None) -> tuple[str, tuple[Host, ...]]:
    """The number of the allocation that this process is in, and its nodes; raises `LaunchError` outside of one."""
    # of a heterogeneous job the first group, as with `srun`
    environment = {name.removesuffix("_HET_GROUP_0"): value for name, value in environment.items()}
    job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        raise LaunchError(
            "engine='slurm' was requested outside of an allocation of SLURM (there is no SLURM_JOB_ID). Start the notebook or the "
            "command inside one: salloc --nodes=2 ..., or a batch script."
        )
    names = _scontrol("hostnames", nodes).split()
    # those that it still has: with --no-kill it outlives a node
    current = _NODE_LIST.search(_facts_of_job(job))
    left = names if current is None or current[1] == nodes else _scontrol("hostnames", current[1]).split()
    # where it was requested for a number of tasks, and no `num_processes` was, they are the nodes' slots
    asks_for_tasks = num_processes is None and {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & environment.keys()
    slots = tasks_of(environment.get("SLURM_TASKS_PER_NODE", "")) if asks_for_tasks else []
    tasks = dict(zip(names, slots, strict=True)) if len(slots) == len(names) else {}
    if hosts := tuple(Host(name, tasks.get(name)) for name in names if name in left):
        return job, hosts
    raise LaunchError(
        f"engine='slurm' was requested on {nodes}, and job {job} has none of these nodes any more. Request another one."
    )


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


class NodeConnection:
    """An agent on a node, which `engine` places unless it is there already; `open` waits until it has sent the facts of its node."""

    # of its node, once it is open
    facts: NodeFacts

    def __init__(self, engine: NodeEngine, name: str, placed: PlacedAgent | None = None) -> None:
        self.engine, self.name = engine, name
        self._placed = placed or engine.place(name)
        self.channel = self._placed.channel
        # whether the facts of its node are known
        self.is_open = False
        self._queried_at = float("-inf")
        # by how many seconds its clock is ahead of this machine's; 0 where that is less than what can be measured
        self.clock_offset = 0.0
        # the addresses of the nodes to which it can connect
        self.reached: frozenset[str] = frozenset()
        # a reply that did not come in time, or before an interrupt, may come yet, and be taken for another one's
        self.is_usable = True

    @property
    def is_ending(self) -> bool:
        """Whether something comes from an agent without workers: it says nothing by itself, so that is its end."""
        return is_ready(self.channel.fileno(), 0)

    def open(self) -> None:
        """Wait for the agent; raises `LaunchError` with what it, or the way to it, wrote."""
        self._query(_START_TIMEOUT)
        # the first reply came after a start of unknown length
        self._query(REPLY_TIMEOUT)

    def refresh(self) -> None:
        """Check that an agent that was there before still is; raises `LaunchError`."""
        if not self.is_open:
            self.open()
        elif time.monotonic() - self._queried_at > _FRESH or self.is_ending:
            self._query(REPLY_TIMEOUT)

    def request(self, message: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Send a message to an agent that has no workers, and wait for its reply; raises `LaunchError` where none comes."""
        self.is_usable = False
        try:
            reply = self.channel.request(message, reply_class, timeout)
        except TimeoutError:
            reason = f"nothing came from it within {timeout:g} s"
        except OSError:
            reason = self._reason()
        else:
            self.is_usable = True
            return reply
        raise LaunchError(
            f"Workers on {self.name} were requested, and its agent can't be reached: {reason}. {self.engine.advice(self.name)}."
        )

    def close(self, timeout: float = END_TIMEOUT) -> None:
        """End the agent, which may take so many seconds for it: one that is lost gets 0."""
        self.channel.shutdown()
        self.channel.close()
        if (process := self._placed.process) is not None:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._placed.output is not None:
            os.close(self._placed.output)

    def _query(self, timeout: float) -> None:
        sent = time.time()
        self.facts = self.request(QueryNode(), NodeFacts, timeout)
        received, self.is_open = time.time(), True
        self._queried_at = time.monotonic()
        offset = self.facts.time - (sent + received) / 2
        self.clock_offset = offset if abs(offset) > (received - sent) / 2 else 0.0

    def _reason(self) -> str:
        """Why nothing more comes."""
        if (error := self.channel.error) is not None:
            is_other = error.refusal == "version"
            return f"{error}: another release of accelerate_nb is installed there" if is_other else str(error)
        process, output = self._placed.process, self._placed.output
        try:
            code = None if process is None else process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            return "it has closed its connection"
        found = b"" if output is None else os.pread(output, 1 << 20, 0)
        written = plain(found.decode(errors="replace")).strip()[-_LAST_OUTPUT:]
        return f"exit code {code}" + (f", and these last words:\n{written}\n" if written else "")


@dataclass
class _NodePool:
    """The connections that no run uses at the moment, by their engine and node."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: dict[tuple[NodeEngine, str], list[NodeConnection]] = field(default_factory=dict)

    def take(self, engine: NodeEngine, name: str) -> NodeConnection | None:
        """A connection that is not in use."""
        with self.lock:
            found = self.idle.get((engine, name))
            return found.pop() if found else None

    def take_all(self, engine: NodeEngine | None = None) -> list[NodeConnection]:
        """All connections that are not in use, or those of one engine."""
        with self.lock:
            keys = [key for key in self.idle if engine is None or key[0] == engine]
            return [connection for key in keys for connection in self.idle.pop(key)]


_pool: ContextVar[_NodePool] = ContextVar("accelerate_nb_nodes", default=_NodePool())  # noqa: B039 - one for all threads


def lease(engine: NodeEngine, names: Sequence[str]) -> tuple[NodeConnection, ...]:
    """The connections to these nodes, the caller's until they are released; raises `LaunchError` where one can't be reached."""
    found: list[NodeConnection] = []
    new: list[NodeConnection] = []

    def cancel() -> None:
        for connection in new:
            if not connection.is_open:
                connection.channel.shutdown()

    try:
        _ = of_all(lambda name: found.append(_connection(engine, name, new)), names, cancel)
    except BaseException:
        for connection in found:
            release(connection, is_usable=True)
        raise
    # in the order of names, of which one may be there twice
    return tuple(found.pop(next(at for at, item in enumerate(found) if item.name == name)) for name in names)


def idle_nodes(engine: NodeEngine) -> list[str]:
    """The names of the nodes of an engine whose agent no run uses, and is still there."""

    def refresh(connection: NodeConnection) -> None:
        # one that does not reply is not usable any more; the first reply, which may take long, is left to the run that needs it
        with suppress(LaunchError):
            if connection.is_open or connection.is_ending:
                connection.refresh()

    found = _pool.get().take_all(engine)
    try:
        if found:
            _ = of_all(refresh, found)
    finally:
        for connection in found:
            release(connection, is_usable=True)
    return [connection.name for connection in found if connection.is_usable]


def release(connection: NodeConnection, is_usable: bool) -> None:
    """Give a connection back; one that is not usable any more is closed."""
    if not is_usable or not connection.is_usable:
        connection.close(0.0)
        return
    pool = _pool.get()
    with pool.lock:
        pool.idle.setdefault((connection.engine, connection.name), []).append(connection)


def open_group(
    engine: NodeEngine, names: Sequence[str], port: int, log_folder: str
) -> tuple[list[partial[RemoteAgent]], NetworkAddress]:
    """The agents' factories of a worker group, in the order of nodes, and its rendezvous, open on the first; raises `LaunchError`."""
    # at a port or, with 0, at any free one; without a folder for whole logs on each node, they are sent here
    connections = lease(engine, names)

    def listen(connection: NodeConnection) -> PeerEndpoint:
        peers = tuple(other.facts.address for other in connections if other is not connection)
        return endpoint_of(connection, ListenToPeers(port if connection is connections[0] else 0, peers))

    try:
        endpoints = of_all(listen, connections)
        hosts = frozenset(endpoint.host for endpoint in endpoints)
        # once for the same nodes
        if not all(hosts <= connection.reached for connection in connections):
            check_reach(connections, endpoints)
            for connection in connections:
                connection.reached = hosts
    except BaseException:
        for connection in connections:
            release(connection, is_usable=True)
        raise
    reader = ChannelReader()
    agents = [
        partial(
            RemoteAgent,
            connection.channel,
            name=connection.name,
            clock_offset=connection.clock_offset,
            inherits_environment=engine.inherits_environment,
            release=partial(release, connection),
            log_folder=log_folder,
            reader=reader,
        )
        for connection in connections
    ]
    return agents, NetworkAddress(endpoints[0].host, endpoints[0].port)


def close_nodes() -> None:
    """End the agents that no run uses, all at the same time."""
    connections = _pool.get().take_all()
    for connection in connections:
        connection.channel.shutdown()
    deadline = time.monotonic() + END_TIMEOUT
    for connection in connections:
        connection.close(max(0.0, deadline - time.monotonic()))


atexit.register(close_nodes)


def _connection(engine: NodeEngine, name: str, new: list[NodeConnection]) -> NodeConnection:
    """A connection to a node, in the list too where it is a new one that is opened."""
    while (idle := _pool.get().take(engine, name)) is not None:
        try:
            idle.refresh()
        except LaunchError:
            # it has ended since the last run
            idle.close(0.0)
        else:
            return idle
    connection = NodeConnection(engine, name)
    new.append(connection)
    try:
        connection.open()
    except BaseException:
        connection.close()
        raise
    return connection
