"""Who may import whom: no module imports from a layer above its own, and no import cycle is left."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.style.source_files import Import, Module, import_cycles, modules, mutual_imports, resolved

# From the lowest to the highest.
ROWS = [
    *({"errors", "user_warnings"}, {"config", "events", "sources"}, {"devices", "export", "failures"}),
    *({"rank", "reports"}, {"runtime", "transport"}, {"big_models", "script", "worker"}),
    *({"supervisor"}, {"launching"}, {"notebook"}, {"cli"}),
]
LAYERS = {folder: number for number, folders in enumerate(ROWS) for folder in folders}
FORBIDDEN = [("launching", "runtime"), ("supervisor", "runtime"), ("notebook", "runtime")]
# A worker, or a command that reads checkpoints itself, loads the runtime once it needs it.
ONLY_IN_FUNCTIONS = [("worker", "runtime"), ("cli", "runtime")]
# A folder above runtime, beside the front ends, that imports nothing of launching.
FORBIDDEN += [("big_models", folder) for folder in ("config", "events", "export")]

# Each optional package is imported by the files of its name, or those of a folder of its name, and by nobody else.
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "aim", "clearml", "dvclive", "swanlab")
OPTIONAL = {name: name for name in ("ray", "tpu_info", "deepspeed", "megatron", "torchdata", *TRACKERS)} | {
    "torch_xla": "xla",
    "grpc": "tpu_info",
    "torch_npu": "others",
    "transformer_engine": "fp8",
    "torchao": "fp8",
    "bitsandbytes": "bnb",
    "tensorboardX": "tensorboard",
    "comet_ml": "comet",
}
# In these folders functions import torch where they need it; in the others its files do; elsewhere nothing does.
TORCH_IN_FUNCTIONS = ("devices", "failures", "launching", "rank", "script", "supervisor", "transport", "worker")
TORCH_WITH_THE_FILE = ("runtime", "big_models")

ALL = modules()


def wrong_layers(sources: list[Module]) -> Iterator[str]:
    """Imports from a layer above, and those that are forbidden."""
    known = {module.name for module in sources}
    for module in sources:
        for item in module.imports:
            found = resolved(item.target, known)
            if found is None or module.folder not in LAYERS or found.count(".") == 0:
                continue
            if item.when == "types" and module.folder == "errors":
                continue  # an error says, to type checkers only, what it carries
            folder = found.split(".")[1]
            if folder == module.folder:
                continue
            if folder not in LAYERS:
                yield f"{location(module, item)}: {folder} re-exports for users; import the module that defines it"
            elif LAYERS[folder] >= LAYERS[module.folder]:
                yield f"{location(module, item)}: layer {LAYERS[module.folder]} imports {folder} of layer {LAYERS[folder]}"
            elif (module.folder, folder) in ONLY_IN_FUNCTIONS and item.when == "import":
                yield f"{location(module, item)}: {module.folder} imports {folder} inside of functions"
            elif (module.folder, folder) in FORBIDDEN:
                yield f"{location(module, item)}: {module.folder} never imports {folder}"


def wrong_torch(sources: list[Module]) -> Iterator[str]:
    """Imports of torch where it is not allowed."""
    for module in sources:
        for item in module.imports:
            if top(item) != "torch" or item.when == "types":
                continue
            if module.folder in TORCH_WITH_THE_FILE or re_exports(module):
                continue
            if item.when == "import" or module.folder not in TORCH_IN_FUNCTIONS:
                yield f"{location(module, item)}: torch is imported {'with the file' if item.when == 'import' else 'here'}"


def wrong_optional(sources: list[Module]) -> Iterator[str]:
    """Imports of optional packages outside the file of their name."""
    for module in sources:
        for item in module.imports:
            owner = OPTIONAL.get(top(item))
            names = {module.path.stem, *(folder.name for folder in module.path.parents)}
            if owner is not None and item.when != "types" and owner not in names:
                yield f"{location(module, item)}: only a file named {owner}.py imports {top(item)}"


def wrong_re_exports(sources: list[Module]) -> Iterator[str]:
    """Lines of a re-exporting file that are neither docstring, imports nor `__all__`."""
    for module in sources:
        if not re_exports(module):
            continue
        for number, node in enumerate(module.tree.body):
            docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            imports = isinstance(node, (ast.Import, ast.ImportFrom))
            names = isinstance(node, (ast.Assign, ast.AnnAssign)) and "__all__" in ast.unparse(node).partition("=")[0]
            if not (docstring or imports or names):
                yield f"{module.path.name}:{node.lineno}: a file that re-exports holds a docstring, imports and __all__"


def re_exports(module: Module) -> bool:
    """Whether a file only re-exports, under one of Hugging Face's module names, at the top level or in `utils/`."""
    return module.folder not in {"", "__main__"} and module.folder not in LAYERS


def top(item: Import) -> str:
    """The distribution's own name in an import."""
    return item.target.split(".")[0]


def location(module: Module, item: Import) -> str:
    """Where an import stands."""
    return f"{module.path.name}:{item.line} ({module.name})"


@pytest.mark.parametrize(
    "rule", [wrong_layers, wrong_torch, wrong_optional, wrong_re_exports, import_cycles], ids=lambda rule: rule.__name__
)
def test_the_package_keeps_the_rule(rule: Callable[[list[Module]], Iterator[str]]) -> None:
    assert list(rule(ALL)) == []


def test_warnings_are_given_where_they_name_the_persons_line():
    calling = [module.name for module in ALL if "warnings.warn(" in module.path.read_text(encoding="utf-8")]
    assert calling == ["accelerate_nb.user_warnings"]


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {module.name: len(module.path.read_text(encoding="utf-8").splitlines()) for module in ALL}
    # all messages between processes are declared on one page
    del lengths["accelerate_nb.transport.messages"]
    assert {name: length for name, length in lengths.items() if length > 600} == {}


def test_no_class_name_occurs_twice() -> None:
    names = [node.name for module in ALL for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    assert [name for name in set(names) if names.count(name) > 1] == []


# ---------------------------------------------------------------------------------------------------------------- stores

STORES = frozenset({"TCPStore", "FileStore", "HashStore", "PrefixStore", "_get_default_store", "host_store", "store"})
UNPICKLERS = frozenset({"Unpickler", "_load_from_bytes", "read_pickle", "load_module_from_bytes"})


def unpickles_and_names_stores(module: Module) -> bool:
    """Whether a file unpickles, and has to do with a `torch.distributed.Store`: every local user can write to one."""
    names, unpickles = set(), False
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            unpickles |= node.attr in {"loads", "load"} and base in {"pickle", "cloudpickle", "dill", "torch"}
            unpickles |= node.attr in UNPICKLERS
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            imported = {f"{node.module}.{alias.name}" for alias in node.names}
            unpickles |= "accelerate_nb.transport.serializer.load" in imported
    return unpickles and not names.isdisjoint(STORES)


def test_no_two_parts_of_launching_import_each_other() -> None:
    assert mutual_imports(ALL, "accelerate_nb.launching") == []


def test_no_file_unpickles_that_reads_a_store() -> None:
    assert [str(module.path) for module in ALL if unpickles_and_names_stores(module)] == []
