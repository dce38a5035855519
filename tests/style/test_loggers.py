"""Every message is written by the logger of a module path that Hugging Face Accelerate has, whose level people set."""

import logging
import re
from importlib import import_module

import pytest
import torch

from accelerate_nb.big_models.memory import get_max_memory
from tests.style.source_files import ROOT

# what only a person with a debugger reads
OWN = {"notebook/display/busy_kernel_comm.py"}
PACKAGE = ROOT / "accelerate_nb"
LOGGERS = {
    str(path.relative_to(PACKAGE)): name
    for path in sorted(PACKAGE.rglob("*.py"))
    for name in re.findall(
        r"^\w+ = (?:logging\.getLogger|get_logger)\((.+)\)$", path.read_text(encoding="utf-8"), re.MULTILINE
    )
}


def test_every_logger_has_the_name_of_a_module_of_accelerate() -> None:
    assert [why for path in sorted(set(LOGGERS) - OWN) if (why := wrong_name(LOGGERS[path].strip('"')))] == []


def wrong_name(name: str) -> str | None:
    """Why people do not find a logger under a name; `None` if they do."""
    for module in (name, name.replace("accelerate_nb", "accelerate", 1)):
        try:
            theirs = import_module(module)
        except ImportError:
            return f"{name}: there is no module {module}"
    known = hasattr(theirs, "logger") or name.endswith("commands.config.default")
    return None if known else f"{name}: Accelerate's module has no logger"


def test_a_level_that_is_set_under_the_path_of_accelerate_is_in_force(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("accelerate_nb.utils.modeling")
    for level, count in ((logging.ERROR, 0), (logging.WARNING, 1)):
        caplog.clear()
        with caplog.at_level(level, logger.name):
            get_max_memory({torch.cuda.device_count() + 7: "1GB", "cpu": "1GB"})
        assert len(caplog.records) == count
