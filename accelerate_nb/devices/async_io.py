"""Whether weights can be moved to a disk and back while a training computes: DeepSpeed compiles an operator with libaio for it."""

import os
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

_OPERATOR = "async_io"


def missing_library() -> str | None:
    """What to install, in words, where the operator is not compiled yet and can't be; else `None`."""
    package = find_spec("deepspeed")
    brought = Path(package.origin).parent / "ops/aio" if package is not None and package.origin is not None else None
    if brought is not None and any(brought.glob(f"{_OPERATOR}_op*.so")):
        return None
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    # torch has a folder for each Python and CUDA, but in a folder that is named to it
    folder = Path(extensions) if extensions else Path(os.path.expanduser(cache), "torch_extensions")
    if any(folder.glob(f"{'' if extensions else '*/'}{_OPERATOR}/{_OPERATOR}.so")):
        return None
    # the compiler has folders of its own; the lack of one is named later
    if (compiler := shutil.which(os.environ.get("CXX", "c++"))) is None:
        return None
    command = [compiler, *shlex.split(os.environ.get("CFLAGS", "")), "-E", "-x", "c++", "-"]
    done = subprocess.run(command, input=b"#include <libaio.h>\n", capture_output=True, timeout=30, check=False)
    if done.returncode == 0:
        return None
    return (
        "Offload to NVMe was requested, for which DeepSpeed compiles its operator async_io, and libaio is not installed here. Install "
        "it (apt-get install libaio-dev, or dnf install libaio-devel), name its folder in CPATH and LIBRARY_PATH, or offload to 'cpu'."
    )
