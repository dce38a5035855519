"""A script on every rank: its first process plays the notebook, and all run the cells that it sends and draw the same numbers."""

import atexit
import fcntl
import hashlib
import io
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

from accelerate_nb.config import magic_args
from accelerate_nb.config.environment import already_launched
from accelerate_nb.config.formats import flags
from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, LaunchError, OperationError, ScriptError
from accelerate_nb.rank import background_tasks
from accelerate_nb.rank.import_hook import after_import
from accelerate_nb.rank.rng_state import RandomStates, current_random_states
from accelerate_nb.reports.text_format import counted
from accelerate_nb.script.cells import execute
from accelerate_nb.sources.cells import current_sources, ipython_shell
from accelerate_nb.transport.memory_file import Bytes
from accelerate_nb.transport.serializer import dump, dump_homeward, explain, load
from accelerate_nb.transport.session_tasks import NAMESPACE

Result = TypeVar("Result")

# The names of a script that a cell of ranks may use, beside those of a session.
_CALLS = "from accelerate_nb.script import shell as nb_shell\nfrom accelerate_nb.script.shell import display"
# The notebook's side may work for as long between two cells.
_TIMEOUT = timedelta(days=365)
# How long the others may take to see that the script is over.
_END = timedelta(seconds=10)


# ----------------------------------------------------------------------------------------------------------- the processes


def begin(file: str, **settings: Any) -> None:
    """Continue as one of the processes that these settings request: the first with the script, others with its cells."""
    # Under plain `python` that is a launch of this very file, with which this process ends. In a launched process the
    # settings reach its `Accelerator`, where the launcher and the environment set nothing else. A file that was
    # imported does neither.
    # the children of a data loader import the script under another name
    if sys._getframe(1).f_globals.get("__name__") != "__main__":
        return
    if not already_launched(os.environ):
        if ipython_shell() is not None:
            # `%run` in a notebook would end the kernel with the script
            name = os.path.basename(file)
            raise LaunchError(
                f"{name} runs on several processes, and was called inside IPython, which would end with it. "
                f"Run `!accelerate-nb launch {name}` instead, or the notebook that it was exported from."
            )
        # -W, -X, -O and their like: no public function gives them, and multiprocessing uses this one too
        options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        words = ["-m", "accelerate_nb", "launch", *flags(settings), os.path.abspath(file), *sys.argv[1:]]
        sys.stdout.flush()
        # the same process goes on as the launch: its exit code and its signals are this one's
        os.execv(sys.executable, [sys.executable, *options, *words])
    # as in a file: the environment wins
    config = resolve({}, os.environ, settings)
    variables = config.training.environ() | (config.launching.environ() if "cpu" in settings else {})
    os.environ.update({**variables, **os.environ})
    requested, size = settings.get("num_processes"), int(os.environ["WORLD_SIZE"])
    if requested not in {None, size} and os.environ["RANK"] == "0":
        print(
            f"{os.path.basename(file)}: its cells request {counted(requested, 'process')}, but {counted(size, 'process')} were started. "
            "Results that depend on their number differ.",
            file=sys.stderr,
        )
    ranks = ScriptRanks(int(os.environ["RANK"]), size)
    _current.set(ranks)
    ranks.open()


# ----------------------------------------------------------------------------------------------------------------- cells


class ScriptRanks:
    """The ranks of a script, seen from one of its processes."""

    # Each has a module for the names of its cells; the first has that of the script too. A message is the name of a
    # method and its arguments, which every process calls.

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.main = ModuleType("__main__")
        self.is_busy = False
        self._script = sys.modules["__main__"]
        # of the ranks' cells, while others are this process's own; none before the first cell
        self._states: RandomStates | None = None
        self._group: Any = None

    def open(self) -> None:
        """Connect with the others; whoever is not the first goes on with their cells until the script is over."""
        if self.size > 1:
            from accelerate_nb.runtime.world.registry import connect_hosts

            self._group = connect_hosts(self.rank, self.size, _TIMEOUT)
        if self.rank == 0:
            atexit.register(self._end)
            return
        sys.modules["__main__"] = self._script = self.main
        self.is_busy = True
        while entries := self._broadcast([]):
            self._do(entries)
        self._group = None
        sys.exit(0)

    def _end(self) -> None:
        """The script is over; where it has failed, the launcher ends the others."""
        if not hasattr(sys, "last_type"):
            with suppress(ScriptError):
                self._broadcast([], timeout=_END)
        # its threads, which end here, let go of tensors after a broadcast, and a process aborts in which they do so at its very end
        self._group = None

    # what the first process asks for

    def cell(self, flags_of_cell: str, source: str, frame: FrameType) -> None:
        """Run a cell on ranks, whose lines begin below that of a frame of the script."""
        options, _ = magic_args.read_cell_line(flags_of_cell)
        ranks = magic_args.ranks_of(options.ranks, self.size)
        code = source, frame.f_code.co_filename, frame.f_lineno
        if options.local:
            execute(*code, frame.f_globals)
        self._all("_run_cell", ranks, *code)

    def line(self, text: str, names: dict[str, Any]) -> Any:
        """Do what a line of `%accelerate` says, with the names of the script."""
        command, rest = magic_args.read_line(text)
        if command.word == "push":
            self._all("_push", magic_args.read_push(rest, names, "the script"))
        elif command.word == "pull":
            self._pull(*magic_args.read_pull(rest), names)
        elif command.word == "run":
            call = magic_args.evaluated_call(rest, names, "the script does not know. Define it first.")
            return self._all("_run", *call)
        elif command.word == "restart":
            self._all("_push", {})
        else:
            raise ConfigurationError(
                f"%accelerate {command.word} was given in a script, which has no use for it. Leave it out."
            )
        return None

    def _pull(self, options: magic_args.PullOptions, wanted: Sequence[str], names: dict[str, Any]) -> None:
        ranks = magic_args.pulled_ranks(options, self.size)
        found = [load(entries) for entries in self._all("_give", tuple(wanted), ranks, frozenset(names))]
        if failures := [item for item in found if isinstance(item, OperationError)]:
            raise failures[0]
        for name in wanted:
            names[name] = [values[name] for values in found] if options.all else found[0][name]

    def _all(self, name: str, *args: Any) -> Any:
        """Have all processes call a method of this class; gives its result in this one."""
        if self._states is None:
            self.send(self._do, "_begin_session", current_random_states())
        return self.send(self._do, name, *args)

    def send(self, work: Callable[[list[Bytes]], Result], name: str, *args: Any) -> Result:
        """Have the others call a method, and do some work in this process meanwhile; gives what the work returns."""
        entries = self._broadcast(self._packed(name, *args))
        self.is_busy = True
        try:
            return work(entries)
        finally:
            self.is_busy = False

    # what each process does

    def _do(self, entries: Sequence[Bytes]) -> Any:
        name, args, definitions = load(entries)
        for key, value in definitions.items():
            vars(self.main).setdefault(key, value)
        return getattr(self, name)(*args)

    def _begin_session(self, states: RandomStates) -> None:
        """The ranks' variables are there, and they draw from where the notebook is."""
        self._states = states
        with self._as_rank():
            exec(compile(NAMESPACE + _CALLS, "<accelerate_nb>", "exec"), vars(self.main))

    def _run_cell(self, ranks: Sequence[int] | None, source: str, file: str, above: int) -> None:
        if ranks is None or self.rank in ranks:
            with self._as_rank():
                execute(source, file, above, vars(self.main))

    def _push(self, values: Mapping[str, Any]) -> None:
        vars(self.main).update(values)

    def _give(self, names: Sequence[str], ranks: Sequence[int], known: frozenset[str]) -> list[list[Bytes]]:
        """The values of these names on these ranks, with what kept a rank from giving them."""
        return [self._broadcast(self._values(names, known) if self.rank == rank else [], rank) for rank in ranks]

    def _values(self, names: Sequence[str], known: frozenset[str]) -> list[Bytes]:
        try:
            with self._as_rank():
                return dump_homeward({name: vars(self.main)[name] for name in names}, known)
        except Exception as error:  # noqa: BLE001 - a pickler calls the user's code, and all processes wait for this one
            why = f"{type(error).__name__}: {error}"
            return dump(OperationError(f"Rank {self.rank} was to send {', '.join(names)}, but could not: {why}."))

    def _run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._as_rank():
            value = function(*args, **kwargs)
            background_tasks.finish()
            return load(dump_homeward(value, frozenset(vars(self._script)))) if self.rank == 0 else None

    def _call(self, function: Callable[..., Any], args: Sequence[Any], states: RandomStates) -> None:
        with _drawing_from(states):
            function(*args)

    @contextmanager
    def _as_rank(self) -> Iterator[None]:
        """Inside the block, the ranks' main module and random numbers take the places of this process's own."""
        assert self._states is not None
        with _drawing_from(self._states):
            sys.modules["__main__"] = self.main
            try:
                yield
            finally:
                sys.modules["__main__"] = self._script
                self._states = current_random_states(gpus=True)

    # messages

    def _packed(self, name: str, *args: Any) -> list[Bytes]:
        definitions: dict[str, Any] = {}
        try:
            return dump((name, args, definitions), definitions)
        except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
            values = {f"argument {number}": value for number, value in enumerate(args)}
            raise explain(values, error, current_sources()) from None

    def _broadcast(self, entries: list[Bytes], source: int = 0, timeout: timedelta = _TIMEOUT) -> list[Bytes]:
        """A message of one process in all of them; an empty one says that the script is over."""
        if self._group is None:
            return entries
        import torch

        # writable where it arrives: tensors are made on it
        message = bytearray(pickle.dumps([bytearray(entry) for entry in entries], 5))
        length = torch.tensor([len(message)])
        try:
            self._group.broadcast(length, source).wait(timeout)
            message = message if self.rank == source else bytearray(int(length))
            self._group.broadcast(torch.frombuffer(message, dtype=torch.uint8), source).wait(timeout)
        except RuntimeError as error:
            if self.rank > 0:
                # whoever is gone has failed, which it reports itself, and the launcher ends this process
                threading.Event().wait(_END.total_seconds())
                sys.exit(1)
            raise ScriptError("Another process of the script is gone; its own error gives the reason.") from error
        return entries if self.rank == source else pickle.loads(message)


@contextmanager
def _drawing_from(states: RandomStates) -> Iterator[None]:
    """Inside the block, this process draws from these states; its own go on afterwards."""
    own = current_random_states(gpus=True)
    states.install()
    try:
        yield
    finally:
        own.install()


_current: ContextVar[ScriptRanks | None] = ContextVar("accelerate_nb_script_ranks", default=None)


def current_ranks() -> ScriptRanks | None:
    """The ranks of this script; `None` where its cells need none."""
    return _current.get()


def everywhere(function: Callable[..., Result], *args: Any) -> Result:
    """A function's result in this process: in a script whose other processes wait for cells, they call the function too."""
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    ranks = _current.get()
    if ranks is None or ranks.is_busy or ranks.size == 1:
        return function(*args)
    return ranks.send(lambda _: function(*args), "_call", function, args, current_random_states())


# --------------------------------------------------------------------------------------------------------- each process

_HASHES = "PYTHONHASHSEED"
_LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
# Python's own; those before a colon have a value.
_OPTIONS, _LONG_OPTIONS = "bBdEhiIOPqRsStuvVxW:X:c:m:", ["check-hash-based-pycs="]
# Whether this process has begun, in all threads and tasks: a script that runs another one goes on with its own numbers.
_begun = threading.Event()
# How often each line of the script was come to: all processes run the same lines.
_times: ContextVar[Counter[str]] = ContextVar("times", default=Counter())  # noqa: B039 - one for all threads and tasks


def launch_digest(environment: Mapping[str, str], *more: object) -> bytes:
    """Bytes that all processes of a launch share, at least on one machine, and hardly those of another."""
    parts = [*more, *map(environment.get, _LAUNCH)]
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        # torchrun calls every run "none" and uses the same port; its folder is new each time, and of one machine
        parts.append(os.path.dirname(os.path.dirname(environment.get("TORCHELASTIC_ERROR_FILE", ""))))
    return hashlib.sha256(repr(parts).encode()).digest()


# --------------------------------------------------------------------------------------------------------- the same numbers


def alike(file: str) -> None:
    """Give this process the random numbers of the others of its launch, and their order of sets of texts."""
    # Python's, numpy's and torch's generators begin with a number that is new for each launch; a seed that the script
    # sets later wins. numpy and torch are seeded when they are imported: what a cell puts into the environment before
    # is read then. `numpy.random.default_rng()` and other sources of the system's entropy differ. A Python that was
    # started with hashes of its own starts once more, in place, with the same words and the hashes of all; below a
    # debugger, or anything else that could not go on, the orders of sets differ.
    if not already_launched(os.environ) or os.environ["WORLD_SIZE"] == "1" or _begun.is_set():
        return
    number = int.from_bytes(launch_digest(os.environ)[:4], "big")
    can_be_set = not sys.flags.ignore_environment and _HASHES not in os.environ and sys.gettrace() is None
    if sys.flags.hash_randomization and can_be_set and can_begin_again(file, sys.orig_argv, sys.argv):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _HASHES: str(number)})
    _begun.set()
    random.seed(number)
    after_import("numpy.random", lambda module: module.seed(number))
    after_import("torch", lambda module: module.manual_seed(number))


def can_begin_again(file: str, words: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether these arguments started a Python that runs this file, and nothing around it."""
    from getopt import GetoptError, getopt  # here, since a notebook loads this file, too

    try:
        options, program = getopt(list(words[1:]), _OPTIONS, _LONG_OPTIONS)
    except GetoptError:
        return False
    runs_file = program == list(arguments) and os.path.abspath(program[0]) == os.path.abspath(file)
    return runs_file and not {"-c", "-m"} & {name for name, _ in options}


# ------------------------------------------------------------------------------------------------------ once on each machine


def system(command: str, frame: FrameType) -> None:
    """Run a command for the line of the script that a frame stands at."""

    def work() -> None:
        sys.stdout.flush()
        shell = os.environ.get("SHELL") or None
        # a background program writes at any time, so its output is not read to its end
        if sys.stdout is sys.__stdout__ or command.rstrip().endswith("&"):
            subprocess.run(command, shell=True, executable=shell, check=False)
            return
        pipe = subprocess.PIPE
        with subprocess.Popen(command, shell=True, executable=shell, stdout=pipe, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            # a progress bar ends its lines in a carriage return
            for line in io.TextIOWrapper(process.stdout, "utf-8", "replace", newline=""):
                sys.stdout.write(line)
                sys.stdout.flush()

    once_on_machine(frame, work)


def once_on_machine(frame: FrameType, work: Callable[[], object]) -> None:
    """Do some work for the line of a frame in one process of this machine; in a %%accelerate cell every process does it."""
    # It is the first process that reaches the line, so the others never wait for one that does not. They wait until the
    # work is done, and `ScriptError` is raised in them if the process that did it failed or is gone.
    ranks_on_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if "LOCAL_RANK" in os.environ else 1
    if ranks_on_machine < 2 or current_ranks() is not None:
        work()
        return
    import psutil

    at = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
    times, parent = _times.get(), psutil.Process(os.getppid())
    times[at] += 1
    # all processes of the launch on this machine have one parent, and no other launch has it, whatever its variables say
    name = launch_digest(os.environ, at, times[at], parent.pid, parent.create_time()).hex()
    path = Path(tempfile.gettempdir()) / f"accelerate-nb-{name}"
    # The operating system releases the lock of a process that ends, however it ends: no process waits for ever.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "a+", encoding="utf-8") as file:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_nlink > 1:
            raise ScriptError(f"{path} is not a file of this user alone. Set TMPDIR to a folder of your own.")
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        # nothing before the first process, "begun" while it works, and a full stop for each process that has passed
        so_far = file.read()
        if so_far == "begun":
            raise ScriptError(
                f"{at} is run once on each machine, and the process that ran it here did not reach its end. Its own error gives "
                "the reason; this process stops with it."
            )
        if not so_far:
            file.write("begun")
            file.flush()
            work()
        file.write(".")
        if so_far.count(".") + 1 >= ranks_on_machine:
            path.unlink(missing_ok=True)
