"""Warnings that name the line of the person who can do something about them."""

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
    while frame is not None:
        file = frame.f_code.co_filename
        # besides ours there is what Python puts around ours: a `with` block, a data class's `__init__`
        is_around = file == contextlib.__file__ or (file, frame.f_code.co_name) == ("<string>", "__init__")
        if not (file.startswith(_PACKAGE) or is_around):
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
