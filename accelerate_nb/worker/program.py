"""A program in a worker: a script, a module or an executable, run as if it had been called by itself."""

import atexit
import builtins
import importlib
import io
import os
import pkgutil
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing.reduction import DupFd
from types import CodeType, ModuleType
from typing import Any, TypeAlias

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.sources.run_source import SourcePart, arguments_part, script_part, word_lines
from accelerate_nb.transport.payload import is_no_failure
from accelerate_nb.worker.stdio import allow_prompts

_NAME = "__main__"
# Their hooks for exceptions print; `exceptiongroup` is what Python 3.10 has exception groups from.
_PRINTING = frozenset({"torch", "accelerate_nb", "exceptiongroup"})


@dataclass(frozen=True, slots=True)
class ScriptFile:
    """A file of Python, or a folder or archive with a `__main__.py`; imports search its folder, or `home`."""

    path: str
    given_path: str
    home: str | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def run(self, arguments: Sequence[str]) -> None:
        sys.argv[:] = [self.given_path, *arguments]
        importer = pkgutil.get_importer(self.path)
        if importer is not None:
            _search_first(self.path)
            _run_spec(importer.find_spec(_NAME, None), self.path)
            return
        self._search_script_folder()
        loader = SourceFileLoader(_NAME, self.path)
        _run_as_main(code_of(self.path), __file__=self.path, __loader__=loader, __package__=None, __spec__=None)

    def imported(self, arguments: Sequence[str]) -> ModuleType:
        """The module that it is under its file's name."""
        sys.argv[:] = [self.given_path, *arguments]
        self._search_script_folder()
        name = os.path.splitext(self.name)[0]
        found = sys.modules.get(name)
        # a script may well be called as a module of Python's own is, which is loaded already
        if found is None or getattr(found, "__file__", None) != self.path:
            found = _load(name, self.path)
        return found

    def _search_script_folder(self) -> None:
        # Python itself follows links before it searches the folder of a script
        _search_first(self.home or os.path.dirname(os.path.realpath(self.path)))


@dataclass(frozen=True, slots=True)
class PythonModule:
    """A module, found as `python -m` finds it."""

    name: str

    def run(self, arguments: Sequence[str]) -> None:
        """Run its code as `__main__`; a package's is in its `__main__` module."""
        _search_first(os.getcwd())
        sys.argv[:] = ["-m", *arguments]
        spec = find_spec(self.name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)
        if spec.submodule_search_locations is not None:
            spec = find_spec(f"{self.name}.{_NAME}")
        sys.argv[0] = getattr(spec, "origin", None) or self.name
        _run_spec(spec, self.name)

    def imported(self, arguments: Sequence[str]) -> ModuleType:
        _search_first(os.getcwd())
        sys.argv[:] = ["-m", *arguments]
        module = importlib.import_module(self.name)
        sys.argv[0] = getattr(module, "__file__", None) or self.name
        return module


@dataclass(frozen=True, slots=True)
class ScriptFunction:
    """A function of a script or a module, which is imported and not run: a `__name__ == "__main__"` in it is not true."""

    of: ScriptFile | PythonModule
    function: str

    @property
    def name(self) -> str:
        return self.of.name

    def run(self, arguments: Sequence[str]) -> None:
        module = self.of.imported(arguments)
        function = getattr(module, self.function, None)
        if not callable(function):
            callables = {name: value for name, value in vars(module).items() if callable(value)}
            own = (name for name, value in callables.items() if getattr(value, "__module__", None) == module.__name__)
            there = ", ".join(sorted(own))
            raise ConfigurationError(
                f"The function {self.function} of {self.name} was to be called, and there is none of that name. "
                f"{f'Name another (it has {there})' if there else 'Define it there'}, or leave --main-training-function out."
            )
        function()


@dataclass(frozen=True, slots=True)
class Executable:
    """A program of any kind, a process of its own below the worker."""

    path: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def run(self, arguments: Sequence[str]) -> None:
        """Wait for the process, hand interrupts on to it, and end as it ended."""
        with subprocess.Popen([self.path, *arguments]) as child:
            try:
                code = child.wait()
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
                child.wait()
                raise
        if code < 0:
            # the worker ends by the signal that ended the program
            signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
            os.kill(os.getpid(), -code)
        if code:
            raise SystemExit(code)


# What can be run as a program: `run` is it, in this process, until it is over; `SystemExit` has its code, if it is not 0.
Runnable: TypeAlias = ScriptFile | PythonModule | ScriptFunction | Executable


@dataclass(eq=False)
class StandardInput:
    """This process's standard input, which can travel to a worker."""

    _descriptor: int

    def __getstate__(self) -> Any:
        return DupFd(self._descriptor)

    def __setstate__(self, descriptor: Any) -> None:
        self._descriptor = descriptor.detach()

    def take_over(self) -> None:
        """Make it the standard input of the process in which this is called."""
        os.dup2(self._descriptor, 0)

    def close(self) -> None:
        os.close(self._descriptor)


def standard_input() -> StandardInput | None:
    """The standard input of this process; `None` where there is none, or a terminal in which others are at work."""
    try:
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            # a command in the background must not take what is typed for the shell
            return None
        return StandardInput(os.dup(0))
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Program:
    """A program that every worker runs in `folder`, with `path` on `sys.path`; rank 0 reads `stdin`."""

    what: Runnable
    arguments: tuple[str, ...] = ()
    folder: str | None = None
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    stdin: StandardInput | None = None
    title: str = ""
    launcher: int = field(default_factory=os.getpid)

    @property
    def __name__(self) -> str:  # what a run is called
        return self.title or self.what.name

    def source_parts(self) -> tuple[SourcePart, ...]:
        """The arguments and the script's text, which the run's folder keeps; a program that is no script has no text."""
        what = self.what.of if isinstance(self.what, ScriptFunction) else self.what
        # a notebook's script lies in a folder that goes with it
        script = script_part(what.path, self.title or what.given_path) if isinstance(what, ScriptFile) else None
        return arguments_part(self, word_lines(self.arguments)) + (() if script is None else (script,))

    def __call__(self) -> None:
        is_worker = os.getpid() != self.launcher
        if self.folder is not None:
            os.chdir(self.folder)
        sys.path[:] = self.path
        if is_worker:
            # as a Python that has just started
            stdin = self.stdin if os.environ.get("RANK") == "0" else None
            who = "no rank" if self.stdin is None else "only rank 0"
            allow_prompts(f"{who} reads the standard input of this launch" if stdin is None else "")
            random.seed()
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed()
            if stdin is not None:
                stdin.take_over()
        try:
            self.what.run(self.arguments)
        except SystemExit as error:
            # `sys.exit()` ends a program as its last line does
            if not is_no_failure(error):
                raise
        except Exception as error:
            _call_hook(error)
            raise
        if is_worker:
            # as Python does when a program's last line has run: its threads, thread pools too, then what it registered
            threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter itself calls
            atexit._run_exitfuncs()


def code_of(path: str) -> CodeType:
    """The code of a file, source or compiled; `SyntaxError` as Python raises it."""
    with io.open_code(path) as file:
        code: CodeType | None = pkgutil.read_code(file)
    if code is not None:
        return code
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _search_first(folder: str) -> None:
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


def _load(name: str, path: str) -> ModuleType:
    """A file as a module of this name; one whose code fails is none."""
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be imported, only run: its name does not end in .py", name=name)
    module = module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


def _run_spec(spec: ModuleSpec | None, name: str) -> None:
    get_code = getattr(getattr(spec, "loader", None), "get_code", None)
    code = None if spec is None or get_code is None else get_code(spec.name)
    if spec is None or code is None:
        raise ImportError(f"{name} can't be run: Python finds no {_NAME} module in it", name=name)
    origin = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader}
    _run_as_main(code, **origin, __package__=spec.parent, __spec__=spec)


def _run_as_main(code: CodeType, **names: Any) -> None:
    """Run code in a new module that is `__main__` from now on: pickle and multiprocessing search it."""
    module = sys.modules[_NAME] = ModuleType(_NAME)
    vars(module).update({"__builtins__": builtins, "__cached__": None, **names})
    exec(code, vars(module))


def _call_hook(error: Exception) -> None:
    """Give an exception to the program's own hook, without the frames that led to the program."""
    hook, trace = sys.excepthook, error.__traceback__
    # those of Python, torch and this package do no more than to print
    if hook is sys.__excepthook__ or getattr(hook, "__module__", "").partition(".")[0] in _PRINTING:
        return
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    hook(type(error), error, trace)
