"""What stands in for NVIDIA's libraries where a CUDA build of torch never meets a GPU: every function reports that there is none."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# torch loads these two by itself, and only once it has found a GPU: the driver, and the compiler at run time.
_NEVER_LOADED = "libcaffe2_nvrtc.so"
_NO_DEVICE = 100  # `cudaErrorNoDevice` of driver_types.h
_OURS = re.compile(r"^(cu|nccl|nv|__cuda)")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of linux/falloc.h


@dataclass(frozen=True)
class Library:
    """A shared library: what it needs, by file, what it defines, and the names it expects of others with their versions."""

    path: Path
    needs: frozenset[str]
    defines: frozenset[str]
    expects: frozenset[tuple[str, str]]
    # which needed file has a version of names
    versions: frozenset[tuple[str, str]]


def main(site: str) -> None:
    """Make the torch in the folder `site` of packages loadable without NVIDIA's packages, and about 1 GB smaller."""
    folder = Path(site, "torch", "lib")
    libraries = [read(path) for path in sorted(folder.glob("*.so*")) if path.name != _NEVER_LOADED]
    for name, source, versions in stand_ins(libraries, present={path.name for path in folder.iterdir()}):
        build(folder / name, source, versions)
    for library in libraries:
        if library.path.name.startswith("libtorch_cuda"):
            forget_machine_code(library.path)


def read(path: Path) -> Library:
    """What `readelf` tells of a library."""
    needs = frozenset(re.findall(r"\(NEEDED\).*\[(.+?)\]", _readelf("--dynamic", path)))
    defines, expects = set(), set()
    for line in _readelf("--dyn-syms", path).splitlines():
        # number, value, size, type, binding, visibility, section, name@VERSION
        fields = line.split()
        if len(fields) < 8 or not fields[0].endswith(":"):
            continue
        name, _, version = fields[7].partition("@")
        if fields[6] == "UND":
            expects.add((name, version.lstrip("@")))
        else:
            defines.add(name)
    return Library(path, needs, frozenset(defines), frozenset(expects), frozenset(_versions(path)))


def no_gpu(name: str) -> str:
    """The C code of a function that reports that there is no GPU."""
    if name.endswith(("ErrorString", "ErrorName", "StatusString")):
        return f'const char *{name}(void) {{ return "there is no GPU"; }}'
    return f"long {name}(void) {{ return {_NO_DEVICE}; }}"


def stand_ins(
    libraries: Iterable[Library], present: set[str], function: Callable[[str], str] = no_gpu
) -> Iterator[tuple[str, str, list[str]]]:
    """For each library of NVIDIA's that is needed and not there: its name, the C code that stands in for it, its versions."""
    every = list(libraries)
    defined = {name for one in every for name in one.defines}
    expected = {item for one in every for item in one.expects}
    of_file: dict[str, set[str]] = {}
    for file, version in {item for one in every for item in one.versions}:
        of_file.setdefault(file, set()).add(version)
    # a name without a version is found in whichever library has it
    anywhere = {name for name, version in expected if not version and _OURS.match(name)} - defined
    for file in sorted({file for one in every for file in one.needs if _is_nvidias(file)} - present):
        versions = sorted(of_file.get(file, ()))
        names = {name for name, version in expected if version in versions} | anywhere
        anywhere = set()
        yield file, "\n".join(map(function, sorted(names))), versions


def build(path: Path, source: str, versions: list[str], *options: str) -> None:
    """Compile a library that is known under its own name, with names of these versions."""
    script = path.with_suffix(".map")
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-w",
        "-fno-builtin",
        "-x",
        "c",
        "-",
        "-o",
        str(path),
        f"-Wl,-soname,{path.name}",
        *options,
    ]
    versioned = [f"-Wl,--version-script={script}"] if versions else []
    subprocess.run([*command, *versioned], input=source, text=True, check=True)
    script.unlink()


def forget_machine_code(path: Path) -> None:
    """Give the disk back what a library holds for GPUs alone; where the file system can't, it stays."""
    found = re.search(r"\.nv_fatbin\s+\w+\s+\w+\s+(\w+)\s+(\w+)", _readelf("--sections", path))
    if found is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    offset, size = (ctypes.c_longlong(int(number, 16)) for number in found.groups())
    with path.open("r+b") as file:
        libc.fallocate(file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, offset, size)


def _is_nvidias(file: str) -> bool:
    return bool(re.match(r"lib(cu|nccl|nv)", file))


def _versions(path: Path) -> Iterator[tuple[str, str]]:
    file = ""
    for line in _readelf("--version-info", path).splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        elif file and (found := re.search(r"Name: (\S+)", line)):
            yield file, found[1]


def _readelf(what: str, path: Path) -> str:
    return subprocess.run(["readelf", "--wide", what, str(path)], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
