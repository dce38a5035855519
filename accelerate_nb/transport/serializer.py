"""Functions, values and tensors as bytes: cloudpickle, with large buffers kept out of the pickle; and what of them can't travel."""

import copyreg
import dis
import getpass
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import cloudpickle

from accelerate_nb.errors import AccelerateNbError, NeedsForkError, PayloadError
from accelerate_nb.failures.exception_copy import exception_reduction
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.transport.memory_file import Bytes

PROTOCOL = 5
_MAIN = "__main__"
# Gives the shell of a process in which a notebook's functions run.
process_shell: ContextVar[Callable[[], Any]] = ContextVar("accelerate_nb_shell", default=lambda: None)


def dump(value: Any, names: dict[str, Any] | None = None, *, main_by_name: bool = False) -> list[Bytes]:
    """A value as a pickle, followed by views of the memory of its arrays and tensors; `load` keeps shared storages shared."""
    # `names` gets the functions and classes of `__main__`, which travel by value, as they come by; it may be the value's last part
    found = {} if names is None else names
    return _PayloadPickler(None if main_by_name else found).entries(value)


def dump_homeward(
    value: Any,
    known: frozenset[str] | None = None,
    reference: Callable[[Any], Any] | None = None,
    whole: Callable[[Any], Any] | None = None,
) -> list[Bytes]:
    """The same for a value on its way to the notebook, where tensors are on the CPU and models as before they were prepared."""
    # The notebook's functions and classes go by name (a forked worker's copy would be another class): all, or those in `known`.
    # What `reference` returns for a part, if anything, stands in its place (see `load`), and what `whole` does for a sharded tensor.
    pickler = _HomewardPickler(known, whole)
    if reference is not None:
        pickler.persistent_id = reference
    return pickler.entries(value)


def load(entries: Sequence[Bytes], referred: Callable[[Any], Any] | None = None) -> Any:
    """The value that `dump` was given; its arrays and tensors use the entries' own memory. `referred` resolves references."""
    if referred is None:
        return pickle.loads(entries[0], buffers=entries[1:])
    unpickler = _PayloadUnpickler(io.BytesIO(entries[0]), buffers=entries[1:])
    unpickler.referred = referred
    return unpickler.load()


# One class for all calls: one of each call, which only the garbage collector frees, would hold what `referred` knows until then.
class _PayloadUnpickler(pickle.Unpickler):
    referred: Callable[[Any], Any]

    # a method, since Python 3.13 refuses one that is set on an Unpickler
    def persistent_load(self, reference: Any) -> Any:
        return self.referred(reference)


class _PayloadPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, names: dict[str, Any] | None) -> None:
        self._names, self._file = names, io.BytesIO()
        self._buffers: list[pickle.PickleBuffer] = []
        super().__init__(self._file, protocol=PROTOCOL, buffer_callback=self._buffers.append)

    def entries(self, value: Any) -> list[Bytes]:
        """A value's pickle, and the buffers that it refers to."""
        self.dump(value)
        return [self._file.getbuffer(), *(buffer.raw() for buffer in self._buffers)]

    def reducer_override(self, obj: Any) -> Any:
        if is_of_main(obj):
            if self._names is None:
                return obj.__qualname__
            self._names[obj.__qualname__] = obj
        if isinstance(obj, types.CodeType):
            # cloudpickle 3.1.3 leaves out the name of the file, by which a traceback finds the cell's lines
            return _code_of_file, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.storage.TypedStorage):
            facts = {"wrap_storage": obj._untyped_storage, "dtype": obj.dtype, "_internal": True}
            return partial(torch.storage.TypedStorage, **facts), ()
        if torch is not None and isinstance(obj, torch.UntypedStorage):
            return _reduce_storage(obj)
        if torch is not None and type(obj) is torch.Tensor and obj.dtype in torch.storage._new_dtypes():
            return _reduce_as_integers(obj)
        if isinstance(obj, BaseException) and (apart := exception_reduction(obj)) is not None:
            return apart
        if (apart := _reduce_shell(obj) or _reduce_handle(obj)) is not None:
            return apart
        return super().reducer_override(obj)


class _HomewardPickler(_PayloadPickler):
    def __init__(self, known: frozenset[str] | None, whole: Callable[[Any], Any] | None) -> None:
        super().__init__({})
        self._known, self._whole = known, whole

    def reducer_override(self, obj: Any) -> Any:
        if is_of_main(obj) and (self._known is None or obj.__qualname__ in self._known):
            return obj.__qualname__
        if getattr(type(obj), "belongs_to_process", False):
            raise PayloadError("It belongs to the process in which it was made.")
        if (torch := sys.modules.get("torch")) is not None:
            if isinstance(obj, torch.Tensor) and (reduced := self._reduce_tensor(obj)) is not None:
                return reduced
            if type(obj) is torch.UntypedStorage and obj.device.type not in ("cpu", "meta"):
                return _itself, (obj.cpu(),)
            if isinstance(obj, torch.nn.Module):
                return _reduce_module(obj) or super().reducer_override(obj)
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: Any) -> Any:
        torch: Any = sys.modules["torch"]
        parameter = torch.nn.Parameter
        # torch's DTensor, whose module may not be loaded
        if hasattr(tensor, "device_mesh") and hasattr(tensor, "full_tensor"):
            if self._whole is None:
                text = "It is sharded over ranks, each of which has a part. Take accelerator.get_state_dict(model)."
                raise PayloadError(text)
            found = self._whole(tensor)
            return (parameter, (found, tensor.requires_grad)) if isinstance(tensor, parameter) else (_itself, (found,))
        if type(tensor) is torch.Tensor and (tensor.requires_grad or tensor.device.type not in ("cpu", "meta")):
            return _itself, (tensor.detach().cpu(),)
        if type(tensor) is parameter and tensor.device.type == "xla":
            # it has no storage
            return parameter, (tensor.detach().cpu(), tensor.requires_grad)
        return None


# The hooks of modules by which strategies, and torch's and Accelerate's own, take part in a step.
_HOOKS = ("_hooks", "_pre_hooks", "_post_hooks")
_MARKS = (
    "__composable_api_state_key",
    "_is_fsdp_managed_module",
    "_fsdp_use_orig_params",
    "_is_accelerate_prepared",
    "_is_prepared_for",
    "_accelerate_nb_context_parallel",
)
_OF_PREPARING = ("accelerate_nb.", "torch.distributed.", "accelerate.")


def _reduce_module(module: Any) -> Any:
    """A module as it was before it was prepared; `None` where nothing of that is known of it."""
    torch: Any = sys.modules["torch"]
    inside = module._modules.get("_orig_mod", vars(module).get("_orig_mod"))
    if isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)) or (
        getattr(type(module), "is_model_wrapper", False)
    ):
        inside = module.module
    if inside is not None:
        # the notebook has no groups to average over, and compiles for itself
        return _itself, (inside,)
    function, arguments, *state = module.__reduce_ex__(PROTOCOL)
    if function is not copyreg.__newobj__ or not state or not isinstance(state[0], dict):  # type: ignore[attr-defined]
        return None
    kind = arguments[0]
    attributes = {name: value for name, value in state[0].items() if not name.startswith(_MARKS)}
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        # torch makes a class of its own from the model's
        kind = kind.__bases__[-1]
    for name in ("_original_forward", "_forward_of_sequences"):  # the second is inside of the first
        if (forward := attributes.pop(name, None)) is not None:
            attributes["forward"] = forward
    if getattr(attributes.get("forward"), "__func__", None) is kind.forward:
        del attributes["forward"]
    for name, hooks in attributes.items():
        if name.endswith(_HOOKS) and isinstance(hooks, dict):
            kept = ((key, hook) for key, hook in hooks.items() if not _is_of_preparing(hook))
            attributes[name] = type(hooks)(kept)
    return _new_object, (kind, *arguments[1:]), attributes, *state[1:]


def _new_object(kind: type, *arguments: Any) -> Any:
    # pickle takes `copyreg.__newobj__` for an object's class alone
    return kind.__new__(kind, *arguments)


def _is_of_preparing(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch's wrapper of hooks that get the module, too
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith(_OF_PREPARING)


def _itself(value: Any) -> Any:
    return value


def _code_of_file(
    filename: str, constructor: Callable[..., types.CodeType], arguments: tuple[Any, ...]
) -> types.CodeType:
    return constructor(*arguments).replace(co_filename=filename)


def _reduce_shell(obj: Any) -> Any:
    """IPython's shell, which stays where it is; `get_ipython` and a kernel's `getpass` are those of the process that they come to."""
    if isinstance(obj, types.MethodType) and obj.__module__ == "ipykernel.kernelbase" and obj.__name__ == "getpass":
        return getattr, (getpass, "getpass")
    shells = sys.modules.get("IPython.core.interactiveshell")
    if shells is None:
        return None
    if isinstance(obj, shells.InteractiveShell):
        # a function that mentions it would drag all of it along, its history's database first
        return type(None), ()
    if isinstance(obj, types.MethodType) and obj.__func__ is shells.InteractiveShell.get_ipython:
        # `!commands` and magics in a function are calls of it
        return _shell_getter, ()
    return None


def _shell_getter() -> Callable[[], Any]:
    return process_shell.get()


def _reduce_handle(obj: Any) -> Any:
    """Multiprocessing's queues, pipes and locks, in multiprocessing's own ways."""
    if get_spawning_popen() is None:
        return None
    # a lock that only a fork can inherit has no name by which another process could find it
    if getattr(getattr(obj, "_semlock", None), "name", "") is None:
        raise NeedsForkError(
            f"A {type(obj).__name__} made by multiprocessing's 'fork' context can only be inherited by a forked process. "
            "Make it with multiprocessing.get_context('spawn'), or pass start_method='fork'."
        )
    reduce = ForkingPickler._extra_reducers.get(type(obj))  # type: ignore[attr-defined]  # where `register` keeps them
    # torch registers its tensors there too, for sharing; a payload copies
    return None if reduce is None or reduce.__module__.startswith("torch") else reduce(obj)


def _reduce_storage(storage: Any) -> Any:
    import torch

    if storage.device.type == "meta":
        return partial(torch.UntypedStorage, device="meta"), (storage.nbytes(),)
    if storage.is_shared() and storage.device.type == "cpu" and get_spawning_popen() is not None:
        # it stays the same memory on the other side, where descriptors can travel along
        from torch.multiprocessing.reductions import reduce_storage

        return reduce_storage(storage)
    held = storage.cpu()
    # a person may have set another default device
    memory: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(held).numpy()
    return _storage, (pickle.PickleBuffer(memory), storage.device.type)


def _reduce_as_integers(tensor: Any) -> Any:
    """A tensor of a type that torch's typed storages don't know (float8, unsigned): the same memory under another type."""
    import torch

    twin = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return _of_integers, (tensor.detach().view(twin), tensor.dtype, tensor.requires_grad)


def _of_integers(integers: Any, dtype: Any, requires_grad: bool) -> Any:
    return integers.view(dtype).requires_grad_(requires_grad)


def _storage(memory: Any, device: str) -> Any:
    import torch

    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    held = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else empty
    kind = getattr(torch, device, None) if device != "cpu" else None
    if kind is not None and kind.is_available() and (count := kind.device_count()):
        # the worker's own device of the kind; where there is none, the value stays on the CPU
        held = held.to(torch.device(device, int(os.environ.get("LOCAL_RANK", "0")) % count))
    return held.untyped_storage()


# --------------------------------------------------------------------------------------------- the __main__ of a worker


def is_of_main(value: Any) -> bool:
    """Whether a value is a function or a class that this process's `__main__` has under its own name."""
    if not isinstance(value, (type, types.FunctionType)) or value.__module__ != _MAIN:
        return False
    return vars(sys.modules[_MAIN]).get(value.__qualname__) is value


def install_main(names: Mapping[str, Any]) -> None:
    """Make a module with these names the `__main__`, to which the plain pickle of ranks refers as `__main__.Name`."""
    module = sys.modules[_MAIN] = types.ModuleType(_MAIN)
    vars(module).update(names)


# ---------------------------------------------------------------------------------------------------- what can't travel

# How far the search looks into what captures what.
_DEEPEST = 6


# A value that can't be pickled, the names over which it is reached, outermost first, and the code of the function that captures it.
UnpicklableValue: TypeAlias = tuple[Any, tuple[str, ...], types.CodeType | None]


def explain(values: Mapping[str, Any], error: BaseException, sources: CellSources) -> AccelerateNbError:
    """The error to raise for named values of which one, at least, could not be pickled with `error`."""
    if isinstance(error, NeedsForkError):
        return error
    seen: set[int] = set()
    searches = (_search(value, (name,), None, seen, 0, dump) for name, value in values.items())
    unpicklable_value = next((found for found in searches if found is not None), None)
    if unpicklable_value is None:
        return PayloadError(
            f"The function or its arguments can't be sent to the workers: {type(error).__name__}: {error}. "
            "Make what can't travel inside the function."
        )
    value, path, owner = unpicklable_value
    value_type = type(value)
    kind = f"{value_type.__module__}.{value_type.__qualname__}".removeprefix("builtins.")
    name = path[-1]
    name = name[2:-2] if name.startswith("['") else name
    where = f" by {owner.co_name!r} in {sources.location(owner.co_filename, owner.co_firstlineno)}" if owner else ""
    return PayloadError(
        f"{name!r}, a {kind}, can't be sent to the workers. It is captured as {' → '.join(path)}"
        f"{where} ({type(error).__name__}: {error}). Make {name!r} inside the function, or pass what it is made from."
    )


def unpicklable_part(value: Any, name: str, dump_value: Callable[[Any], object]) -> str:
    """The part of a value that `dump_value` can't pickle, from `name` on, with its type: "result['lock'] is a lock"."""
    found = _search(value, (name,), None, set(), 0, dump_value)
    if found is None:
        return f"{name} is more than can be pickled"
    part, names, _ = found
    path = "".join(word if word.startswith(("[", ".")) else f" → {word}" for word in names[1:])
    kind = type(part).__qualname__
    return f"{name}{path} is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def _search(
    value: Any,
    path: tuple[str, ...],
    owner: types.CodeType | None,
    seen: set[int],
    depth: int,
    dump_value: Callable[[Any], object],
) -> UnpicklableValue | None:
    """The innermost thing that fails, depth first; `None` where all parts can travel."""
    if id(value) in seen or depth > _DEEPEST:
        return None
    with suppress(Exception):  # a pickler calls anybody's code, which may raise anything
        dump_value(value)
        return None
    seen.add(id(value))
    if _refuses(value):
        return value, path, owner
    is_function = isinstance(value, (types.FunctionType, types.MethodType))
    holder = getattr(value, "__code__", None) if is_function else None
    for name, part in _parts(value):
        found = _search(part, (*path, name), holder or owner, seen, depth + 1, dump_value)
        if found is not None:
            return found
    return value, path, owner


def _refuses(value: Any) -> bool:
    """Whether the value itself refuses, as an `Accelerator` does, whatever its parts would do."""
    if getattr(type(value), "belongs_to_process", False):
        return True
    try:
        value.__reduce_ex__(PROTOCOL)
    except AccelerateNbError:
        return True
    except Exception:  # noqa: BLE001 - anybody's code, as above
        return False
    return False


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    match value:
        case types.FunctionType():
            return _captured(value)
        case types.MethodType():
            return [("self", value.__self__)]
        case partial():
            return [("func", value.func), *_numbered(value.args, "args"), *value.keywords.items()]
        case Mapping():
            return ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple() | set() | frozenset():
            return _numbered(value, "")
        case type():
            members = ((name, getattr(part, "__func__", part)) for name, part in vars(value).items())
            kept = ((name, part) for name, part in members if name[:2] != "__" or isinstance(part, types.FunctionType))
            return ((f"{value.__name__}.{name}", part) for name, part in kept)
        case _:
            names = (*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ()))
            return [(type(value).__name__, type(value)), *((f".{name}", getattr(value, name, None)) for name in names)]


def _numbered(parts: Iterable[Any], name: str) -> Iterator[tuple[str, Any]]:
    return ((f"{name}[{index}]", part) for index, part in enumerate(parts))


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # of a variable that is not set yet
            yield name, cell.cell_contents
    for name in sorted(global_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for index, default in enumerate(function.__defaults__ or ()):
        yield f"default {index}", default
    yield from (function.__kwdefaults__ or {}).items()


# Instructions that look a name up beside a function's own variables.
_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"})


def global_names(code: types.CodeType) -> set[str]:
    """The names that code, and the functions in it, look up beside their own variables."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    # `co_names` has those of attributes, too
    own = {step.argval for step in dis.get_instructions(code) if step.opname in _LOADS}
    return own.union(*(global_names(const) for const in inner))
