"""Who may import whom: the floors of the house hold."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house.reading import Import, Module, modules, resolved

FLOOR = {
    "errors": 0,
    "notices": 0,
    "own": 0,
    "config": 1,
    "events": 1,
    "export": 2,
    "devices": 2,
    "reports": 2,
    "launching": 3,
    "runtime": 3,
    "big_models": 4,
    "notebook": 4,
    "script": 4,
    "cli": 5,  # it reads the options of a script before the script does
}
STRANGERS = [("launching", "runtime"), ("runtime", "launching"), ("notebook", "cli"), ("cli", "notebook")]
STRANGERS += [("notebook", "runtime"), ("cli", "runtime")]
# What scripts call runs in whatever process the script does, which some launcher, or none, has started.
STRANGERS += [("script", "launching")]
# A room above runtime, beside the front ends, that knows no launching.
STRANGERS += [("big_models", room) for room in ("config", "events", "export", "launching")]

# Each optional package is imported by the files of its name, and by nobody else.
OPTIONAL = {
    "ray": "ray",
    "torch_xla": "xla spmd",
    "tpu_info": "tpu_info",
    "grpc": "tpu_info",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "torch_npu": "others",
    "transformer_engine": "fp8_te",
    "torchao": "fp8_ao",
    "bitsandbytes": "bnb",
    "torchdata": "torchdata",
    "tensorboard": "tensorboard",
    "tensorboardX": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "comet_ml": "comet",
    "aim": "aim",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
}
# In these rooms torch is imported by functions that need it; in others with the file; elsewhere not at all.
TORCH_IN_FUNCTIONS = ("accelerate_nb.devices.", "accelerate_nb.launching.", "accelerate_nb.script.")
TORCH_AT_HOME = ("runtime", "big_models")

ALL = modules()
NAMES = {module.name for module in ALL}


def wrong_floors(house: list[Module]) -> Iterator[str]:
    """Imports that go up, or across a wall."""
    known = {module.name for module in house}
    for module in house:
        for item in module.imports:
            found = resolved(item.target, known)
            if found is None or module.room not in FLOOR or found.count(".") == 0:
                continue
            if item.when == "types" and module.room == "errors":
                continue  # an error says, to type checkers only, what it carries
            room = found.split(".")[1]
            if room == module.room:
                continue
            if room not in FLOOR:
                yield f"{place(module, item)}: {room} is a door, for people outside; import what it re-exports"
            elif FLOOR[room] >= FLOOR[module.room]:
                yield f"{place(module, item)}: floor {FLOOR[module.room]} imports {room} of floor {FLOOR[room]}"
            elif (module.room, room) in STRANGERS:
                yield f"{place(module, item)}: {module.room} never imports {room}"


def wrong_torch(house: list[Module]) -> Iterator[str]:
    """Imports of torch where it is not at home."""
    for module in house:
        for item in module.imports:
            if top(item) != "torch" or item.when == "types" or module.room in TORCH_AT_HOME or is_door(module):
                continue
            if item.when == "import" or not module.name.startswith(TORCH_IN_FUNCTIONS):
                yield f"{place(module, item)}: torch is imported {'with the file' if item.when == 'import' else 'here'}"


def wrong_optional(house: list[Module]) -> Iterator[str]:
    """Imports of optional packages outside the file of their name."""
    for module in house:
        for item in module.imports:
            owner = OPTIONAL.get(top(item))
            if owner is not None and item.when != "types" and module.path.stem not in owner.split():
                yield f"{place(module, item)}: only a file named {owner.replace(' ', '.py or ')}.py imports {top(item)}"


def wrong_doors(house: list[Module]) -> Iterator[str]:
    """Lines of a door that are neither docstring, imports nor `__all__`."""
    for module in house:
        if not is_door(module):
            continue
        for number, node in enumerate(module.tree.body):
            docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            imports = isinstance(node, (ast.Import, ast.ImportFrom))
            names = isinstance(node, (ast.Assign, ast.AnnAssign)) and "__all__" in ast.unparse(node).partition("=")[0]
            if not (docstring or imports or names):
                yield f"{module.path.name}:{node.lineno}: a door holds a docstring, imports and __all__"


def cycles(house: list[Module]) -> list[tuple[str, ...]]:
    """Groups of files that import each other when they are imported."""
    known = {module.name for module in house}
    edges: dict[str, set[str]] = {}
    for module in house:
        targets = {resolved(item.target, known) for item in module.imports if item.when == "import"}
        edges[module.name] = {target for target in targets if target} - {module.name}
    knots: list[tuple[str, ...]] = []
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            knots.append((*trail[trail.index(name) :], name))
        elif name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())
    return knots


def is_door(module: Module) -> bool:
    """Whether a file stands at the top, or in `utils/`, for Hugging Face's module names."""
    return module.room not in {"", "__main__"} and module.room not in FLOOR


def top(item: Import) -> str:
    """The distribution's own name in an import."""
    return item.target.split(".")[0]


def place(module: Module, item: Import) -> str:
    """Where an import stands."""
    return f"{module.path.name}:{item.line} ({module.name})"


@pytest.mark.parametrize(
    "rule", [wrong_floors, wrong_torch, wrong_optional, wrong_doors, cycles], ids=lambda rule: rule.__name__
)
def test_the_house_keeps_its_rules(rule: Callable[[list[Module]], Iterator[str]]) -> None:
    assert list(rule(ALL)) == []


BROKEN = [
    (wrong_floors, {"launching/a.py": "from accelerate_nb.runtime import b", "runtime/b.py": ""}),
    (wrong_floors, {"runtime/a.py": "def f():\n    import accelerate_nb.launching.b", "launching/b.py": ""}),
    (wrong_floors, {"notebook/a.py": "from accelerate_nb.runtime.b import c", "runtime/b.py": ""}),
    (wrong_floors, {"runtime/a.py": "from accelerate_nb.big_models.b import c", "big_models/b.py": ""}),
    (wrong_floors, {"big_models/a.py": "from accelerate_nb.launching.b import c", "launching/b.py": ""}),
    (wrong_floors, {"errors.py": "from accelerate_nb.events import model", "events/model.py": ""}),
    (wrong_floors, {"launching/a.py": "from accelerate_nb.state import X", "state.py": ""}),
    (wrong_torch, {"launching/a.py": "import torch"}),
    (wrong_torch, {"events/a.py": "def f():\n    import torch.distributed"}),
    (wrong_torch, {"devices/a.py": "class A:\n    from torch import cuda"}),
    (wrong_optional, {"launching/engines/local.py": "def f():\n    import ray"}),
    (wrong_doors, {"state.py": "'''Hi.'''\nfrom accelerate_nb.runtime.a import b\nc = b()", "runtime/a.py": ""}),
    (wrong_doors, {"utils/a.py": "def f(): ..."}),
    (cycles, {"config/a.py": "import accelerate_nb.config.b", "config/b.py": "from accelerate_nb.config.a import x"}),
]
SOUND = {
    "errors.py": "'''Errors.'''\nfrom typing import TYPE_CHECKING\n",
    "launching/a.py": "def f():\n    import torch\nfrom accelerate_nb.errors import E",
    "launching/engines/ray.py": "def f():\n    import ray",
    "runtime/b.py": "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wandb",
    "state.py": "'''Hi.'''\nfrom accelerate_nb.runtime.b import torch\n__all__ = ['torch']",
}


@pytest.mark.parametrize(
    ("rule", "files"), BROKEN, ids=lambda value: getattr(value, "__name__", None) or "-".join(value)
)
def test_a_rule_sees_what_breaks_it(rule: Callable, files: dict[str, str], tmp_path: Path) -> None:
    assert list(rule(built(tmp_path, files)))
    assert not list(rule(built(tmp_path / "sound", SOUND)))


def built(folder: Path, files: dict[str, str]) -> list[Module]:
    """A small house of these files."""
    for name, text in files.items():
        path = folder / "accelerate_nb" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return modules(folder / "accelerate_nb")


def test_warnings_are_given_where_they_name_the_persons_line():
    calling = [module.name for module in ALL if "warnings.warn(" in module.path.read_text(encoding="utf-8")]
    assert calling == ["accelerate_nb.notices"]
