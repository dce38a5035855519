"""Warnings that name the line of the person who can do something about them."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import FrameType

_PACKAGE = os.path.dirname(__file__) + os.sep


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """
    Warn of something, at the innermost line outside of this package that led here.

    >>> warn_user("The loader has no length.")  # doctest: +SKIP
    """
    # `skip_file_prefixes` of warnings.warn does the same from Python 3.12 on
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _is_between(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _is_between(frame: FrameType) -> bool:
    """Whether a frame is one of ours, or of what Python puts around ours: a `with` block, a data class's `__init__`."""
    code = frame.f_code
    if code.co_filename.startswith(_PACKAGE) or code.co_filename == contextlib.__file__:
        return True
    return (code.co_filename, code.co_name) == ("<string>", "__init__")
