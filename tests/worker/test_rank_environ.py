"""Ranks of one process find their own place in the environment; what is theirs is nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os
from accelerate_nb.worker.rank_environ import separate, set_variables
from accelerate_nb.rank_local import alone

os.environ["RANK"] = "7"
separate(("RANK", "LOCAL_RANK"))
ranks = [alone(), alone()]
for number, rank in enumerate(ranks):
    rank.run(set_variables, {"RANK": str(number)})
print([rank.run(os.environ.get, "RANK") for rank in ranks], os.environ.get("RANK"))
ranks[0].run(os.environ.update, {"RANK": "5", "COMMON": "1"})
print([rank.run(os.environ.get, "RANK") for rank in ranks], ranks[1].run(os.environ.get, "COMMON"))
print(["RANK" in rank.run(dict, os.environ) for rank in ranks], "RANK" in dict(os.environ))
print(ranks[0].run(len, os.environ) - len(os.environ), ranks[1].run(os.environ.pop, "RANK"), "RANK" in os.environ)
"""
NAMES = """
import os
from accelerate_nb.worker.rank_environ import separate

separate(("RANK",))
names = iter(os.environ._data)
first = next(names)
os.environ["WRITTEN_MEANWHILE"] = "1"
print(len([first, *names]) == len(os.environ) - 1)
"""


def test_names_are_read_while_another_rank_writes_some():
    assert printed_by(NAMES) == ["True"]


def test_each_rank_reads_and_writes_its_own_and_shares_the_rest():
    assert printed_by(PROGRAM) == ["['0', '1'] None", "['5', '1'] 1", "[True, True] False", "1 1 False"]


def printed_by(program: str) -> list[str]:
    """The lines that a program prints in a process of its own."""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    return done.stdout.splitlines()
