"""A file that is written whole, or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from accelerate_nb.errors import ExportError


def write_whole(path: Path, text: str) -> None:
    """Replace the text of a file at once, and keep its permissions and links; `OSError` leaves what was there."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_output(output: Path, text: str) -> None:
    """Write the output file of a command; `ExportError` names it where it can't be written, and leaves what is there."""
    try:
        write_whole(output, text)
    except OSError as error:
        raise ExportError(
            f"{output} was to be written, but it can't be: {error.strerror}. Name another file."
        ) from None
