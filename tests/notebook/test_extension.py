"""The extension warms the supervisor, and tells it what the notebook uses."""

import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from accelerate_nb.launching.engines import supervisor as supervised
from accelerate_nb.notebook.extension import is_useful, load_ipython_extension, modules_of, unload_ipython_extension


@pytest.fixture
def supervisor(monkeypatch):
    """What the supervisor was asked for."""
    asked = SimpleNamespace(warmed=0, cooled=0, preloaded=[])
    monkeypatch.setattr(supervised, "warm", lambda idle_timeout=None: setattr(asked, "warmed", asked.warmed + 1))
    monkeypatch.setattr(supervised, "cool", lambda: setattr(asked, "cooled", asked.cooled + 1))
    monkeypatch.setattr(supervised, "preload", lambda names: asked.preloaded.append(list(names)))
    return asked


@pytest.fixture
def shell(one_shell, supervisor):
    one_shell.reset()
    yield one_shell
    unload_ipython_extension(one_shell)


def test_it_sends_each_module_once_at_once_or_after_the_cell_that_names_it_until_unloaded(shell, supervisor, capsys):
    shell.run_cell("import yaml")
    load_ipython_extension(shell)
    assert (supervisor.warmed, supervisor.preloaded) == (1, [["yaml"]])
    shell.run_cell("from packaging.version import Version, parse")
    shell.run_cell("x = 1")
    # a cell that failed has imported, too
    shell.run_cell("import yaml, json\nimport msgspec\nraise KeyError")
    assert supervisor.preloaded == [["yaml"], ["packaging.version"], ["msgspec"]]
    # loaded twice it watches once
    load_ipython_extension(shell)
    supervisor.preloaded.clear()
    shell.run_cell("import numpy")
    assert supervisor.preloaded == [["numpy"]]
    unload_ipython_extension(shell)
    shell.run_cell("import rich")
    assert (supervisor.preloaded, supervisor.cooled) == ([["numpy"]], 1)


def test_unloading_what_was_not_loaded_is_quiet(shell, supervisor):
    unload_ipython_extension(shell)
    assert supervisor.cooled == 1


def test_values_name_the_modules_that_they_come_from():
    values = [np, np.array([1]), np.linalg.norm, ModuleType("mine"), 3, len, pytest.raises]
    assert {"numpy", "mine", "builtins"} <= set(modules_of(values))


class Lazy:
    """An object that does something when it is looked at."""

    @property
    def __class__(self):
        raise RuntimeError

    def __getattr__(self, name):
        raise RuntimeError


def test_lazy_objects_are_left_alone():
    assert list(modules_of([Lazy()])) == [__name__]


def test_only_installed_modules_that_are_not_loaded_anyway_are_sent(tmp_path, monkeypatch):
    (tmp_path / "mine_own.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    import mine_own  # noqa: F401

    assert is_useful("yaml")
    assert is_useful("numpy.linalg")
    not_sent = ("mine_own", "json", "sys", "__main__", "builtins", "torch.nn", "accelerate_nb.errors", "no_such_module")
    assert not any(map(is_useful, not_sent))
    del sys.modules["mine_own"]


def test_watching_costs_a_cell_nearly_nothing(shell, supervisor):
    load_ipython_extension(shell)
    shell.user_ns.update({f"name_{i}": i for i in range(5000)})
    (watcher,) = [callback for callback in shell.events.callbacks["post_run_cell"] if "Watcher" in repr(type(callback))]
    begin = time.thread_time()
    watcher()
    assert time.thread_time() - begin < 0.05
