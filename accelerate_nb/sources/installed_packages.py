"""Code of installed packages, this one among them, and the person's own: a notebook changes its own files alone."""

import sys
import sysconfig
from itertools import islice
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = frozenset({"site-packages", "dist-packages"})
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# What Python, numpy and torch.compile name code that is in no file of a person.
_MADE_UP = ("<frozen", "<__array_function__", "<eval_with_key>")


def is_user_file(filename: str) -> bool:
    """Whether a file is the person's: no installed package, and none of this one, wherever that is installed."""
    path = Path(filename)
    is_installed = not _FOLDERS.isdisjoint(path.parts) or filename.startswith((*_INSTALLED, *_MADE_UP))
    return not is_installed and _PACKAGE not in path.parents


def package_of(filename: str) -> str:
    """The name of the package that a file of none of the person's is in; "python" where it is in none."""
    path = Path(filename)
    if _PACKAGE in path.parents:
        return _PACKAGE.name
    for root in sorted(_INSTALLED, key=len, reverse=True):
        if filename.startswith(root):
            return path.relative_to(root).parts[0].removesuffix(".py")
    return "python"


def is_installed(name: str) -> bool:
    """Whether a loaded module came with an installed package."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and not _FOLDERS.isdisjoint(Path(file).parts)


def installation_times() -> dict[str, int]:
    """The folders of `sys.path` that packages are installed into, and when a package last came, changed or went, in ns."""
    folders = [folder for folder in map(Path, sys.path) if not _FOLDERS.isdisjoint(folder.parts) and folder.is_dir()]
    return {str(folder): folder.stat().st_mtime_ns for folder in folders}


def loaded_since(count: int) -> tuple[str, ...]:
    """The installed modules that were loaded since there were `count` modules, in the order of their loading."""
    # from the end, where the new ones are: in a forked process, to read a name is to copy its page of memory
    new_names = list(islice(reversed(sys.modules), max(0, len(sys.modules) - count)))
    return tuple(name for name in reversed(new_names) if is_installed(name))
