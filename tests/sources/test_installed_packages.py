"""Modules of installed packages are told from the person's own."""

import sys
import types

from accelerate_nb.sources.installed_packages import is_installed, loaded_since


def test_installed_packages_are_distinguished_from_the_rest(monkeypatch):
    module = types.ModuleType("my_model")
    module.__file__ = "/home/me/site/my_model.py"
    monkeypatch.setitem(sys.modules, "my_model", module)
    monkeypatch.setitem(sys.modules, "hidden", None)
    assert is_installed("pytest")
    assert is_installed("_pytest.config")
    assert not any(map(is_installed, ["sys", "json", "my_model", "hidden", "not_loaded_at_all", __name__]))


def test_what_was_loaded_since_comes_in_its_order(monkeypatch):
    before = len(sys.modules)
    for name in ("zebra", "ant", "own"):
        module = types.ModuleType(name)
        module.__file__ = f"/x/{'site-packages' if name != 'own' else 'src'}/{name}.py"
        monkeypatch.setitem(sys.modules, name, module)
    assert loaded_since(before) == ("zebra", "ant")
    assert loaded_since(len(sys.modules)) == ()
