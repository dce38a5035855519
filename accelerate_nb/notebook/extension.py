"""`%load_ext accelerate_nb`: the first launch finds its supervisor warm, and cells can run on every rank."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from accelerate_nb.launching.engines import supervisor
from accelerate_nb.launching.launcher import warm_early
from accelerate_nb.notebook import magics
from accelerate_nb.sources.installed_packages import is_installed

_EVENT = "post_run_cell"
# Already loaded by the supervisor, or of use to the notebook alone.
_LEFT_OUT = frozenset(
    {"__main__", "torch", "accelerate_nb", "IPython", "ipykernel", "ipywidgets", "matplotlib_inline", "traitlets"}
)


def load_ipython_extension(ipython: Any) -> None:
    """
    Start the supervisor in the background, and send it after each cell the installed modules that the notebook uses.

    `%%accelerate` and `%accelerate` are there from then on.

    >>> %load_ext accelerate_nb
    """
    warm_early()
    watcher = ModuleWatcher(ipython)
    watcher()
    ipython.events.register(_EVENT, watcher)
    magics.register(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """End the session of `%%accelerate`, stop the supervisor, and watch the notebook no longer."""
    if ModuleWatcher(ipython) in ipython.events.callbacks[_EVENT]:
        ipython.events.unregister(_EVENT, ModuleWatcher(ipython))
    magics.unregister(ipython)
    supervisor.cool()


@dataclass(frozen=True)
class ModuleWatcher:
    """Sends the supervisor the installed modules that the notebook's names refer to, each once."""

    # two watchers of one shell are equal: an extension that is loaded twice, or unloaded, finds the former one
    shell: Any
    reported: set[str] = field(default_factory=set, compare=False)

    def __call__(self, _result: Any = None) -> None:
        """A cell has run."""
        hidden = self.shell.user_ns_hidden
        values = [value for name, value in list(self.shell.user_ns.items()) if name not in hidden]
        new = sorted(name for name in set(modules_of(values)) - self.reported if is_useful(name))
        if new:
            self.reported.update(new)
            supervisor.preload(new)


def modules_of(values: Iterable[Any]) -> Iterator[str]:
    """The modules that these values are, or that define them or their classes."""
    for value in values:
        # by `type`, since reading a lazy object's `__class__` may do anything
        value_type = type(value)
        if issubclass(value_type, ModuleType):
            name = value.__dict__.get("__name__")
        elif issubclass(value_type, (type, FunctionType, BuiltinFunctionType)):
            name = value.__module__
        else:
            name = value_type.__module__
        if isinstance(name, str):
            yield name


def is_useful(name: str) -> bool:
    """Whether a module is worth loading early: it came with a package, and the supervisor has not loaded it anyway."""
    return name.partition(".")[0] not in _LEFT_OUT and is_installed(name)
