"""The error that is raised has the causing rank's type and values, and tells of all ranks, and how they died."""

import builtins
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate_nb.errors import HangError, WorkerError
from accelerate_nb.events.event_types import Failure
from accelerate_nb.failures.rank_result import RankResult, death_failure
from accelerate_nb.failures.worker_error import hang_error, stopped_error, worker_error
from tests.failures.test_exception_copy import Frozen, Wants

FOLDER = Path("/runs/one")


class OwnStr(Exception):
    """Names that ours has as well."""

    @property
    def message(self):
        return "own"

    rank = "own"

    def __str__(self):
        return "own words"


def raised(rank, error, time=1.0, **more):
    failure = Failure(rank, type(error).__name__, str(error), "the traceback", time, **more)
    return RankResult(rank, failure=failure, error=error)


GROUPS = [builtins.ExceptionGroup("g", [ValueError("in")])] if sys.version_info >= (3, 11) else []


@pytest.mark.parametrize("error", [KeyError("x"), Wants(1, second=[2]), Frozen(3), OwnStr(), *GROUPS], ids=type)
def test_the_error_is_caught_by_the_worker_s_class_by_ours_and_by_torch_s(error):
    found = worker_error([RankResult(0, value=1), raised(1, error)], FOLDER)
    for error_class in (type(error), WorkerError, ChildFailedError):
        with pytest.raises(error_class):
            raise found
    assert type(found).__name__ == type(error).__name__
    assert found.args == error.args
    assert found.rank == 1
    assert [failure.rank for failure in found.failures] == [1]
    assert found.folder == str(FOLDER)
    assert str(found).startswith(f"rank 1 stopped with {type(error).__name__}: ")
    assert "the traceback" in str(found)
    assert str(FOLDER) in str(found)


def test_an_oserror_keeps_its_number_and_its_file():
    found = worker_error([raised(0, FileNotFoundError(2, "not here", "a.txt"))], FOLDER)
    assert isinstance(found, FileNotFoundError)
    assert (found.errno, found.strerror, found.filename) == (2, "not here", "a.txt")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=type)
def test_what_would_end_this_process_or_pass_for_an_interrupt_is_an_ordinary_error(error):
    found = worker_error([raised(0, error)], FOLDER)
    assert isinstance(found, WorkerError)
    assert not isinstance(found, type(error))
    assert type(error).__name__ in str(found)


def test_a_class_that_can_t_be_combined_is_replaced_by_ours():
    class Alone(Exception):
        def __init_subclass__(cls):
            raise TypeError("no subclass of mine")

    found = worker_error([raised(0, Alone("why"))], FOLDER)
    assert type(found).__name__ == "WorkerError"
    assert found.args == ("why",)


def test_every_rank_is_reported_and_those_that_only_followed_in_one_line():
    rank_results = [
        raised(0, RuntimeError("Connection closed by peer"), 1.0, lost_connection=True),
        raised(1, KeyError("cause"), 2.0),
        raised(2, KeyboardInterrupt(), 3.0, ended_by_us=True),
        raised(3, KeyboardInterrupt(), 3.0, ended_by_us=True),
        *(raised(rank, ValueError(f"own {rank}"), 3.0) for rank in range(4, 12)),
    ]
    text = str(worker_error(rank_results, FOLDER))
    assert text.startswith("rank 1 stopped with KeyError: 'cause'")
    assert "rank 0 lost its connection" in text
    assert "ranks 2-3 were ended because of it" in text
    assert "rank 4 stopped with ValueError: own 4" in text
    assert "rank 11" not in text
    assert len(text.splitlines()) < 20


def test_ranks_that_failed_alike_are_one_line():
    same = [raised(rank, ValueError("alike"), float(rank)) for rank in range(4)]
    text = str(worker_error([*same, raised(4, ValueError("other"), 9.0)], FOLDER))
    assert text.count("alike") == 1
    assert "ranks 1-3 stopped with the same\nrank 4 stopped with ValueError: other" in text


def test_advice_stands_before_the_folder():
    text = str(worker_error([raised(0, ValueError("x"), advice="Do this.")], FOLDER))
    assert text.endswith(f"\n\nWhat to do: Do this.\n\nAll output: {FOLDER}")


def test_a_run_that_was_stopped_reports_after_which_step():
    rank_results = [RankResult(0, value=1), raised(1, KeyboardInterrupt(), ended_by_us=True)]
    found = stopped_error("after step 7", rank_results, FOLDER)
    assert isinstance(found, KeyboardInterrupt)
    assert str(found).startswith("the run was stopped, as requested, after step 7, on every rank.")
    # IPython shows one line, and no traceback
    assert found._render_traceback_() == [" ".join(str(found).split())]
    assert (found.rank, found.folder) == (1, str(FOLDER))
    assert "wherever its ranks were" in str(stopped_error(None, rank_results, FOLDER))


@pytest.mark.parametrize(
    ("code", "name", "word"),
    [
        (3, "exit code 3", "it ended itself"),
        (0, "exit code 0", "before its function returned"),
        (-9, "SIGKILL", "memory"),
        (-11, "SIGSEGV", "compiled code"),
        (-6, "SIGABRT", "a signal"),
        (-63, "signal 63", "a signal"),
    ],
)
def test_a_death_names_its_code_or_signal_and_what_that_means(code, name, word):
    found = death_failure(2, code, last_lines=["a", "b"], time=1.0, ended_by_us=False)
    assert (found.rank, found.type, found.exit_code, found.last_lines) == (2, name, code, ("a", "b"))
    assert word in found.message


def test_a_death_reports_the_last_lines():
    failure = death_failure(1, -signal.SIGSEGV, last_lines=["a", "b"], time=1.0, ended_by_us=False)
    found = worker_error([RankResult(0, value=None), RankResult(1, failure=failure)], FOLDER)
    assert str(found).startswith("rank 1 ended with SIGSEGV")
    assert "  a\n  b" in str(found)


def test_a_headline_is_one_short_line():
    text = str(worker_error([raised(0, ValueError("x" * 10_000 + "\nsecond"))], FOLDER))
    assert len(text.splitlines()[0]) < 400


def test_a_hang_reports_who_had_returned_and_where_the_others_were():
    death = death_failure(1, -9, last_lines=[], time=1.0, ended_by_us=True)
    found = hang_error(2.5, "rank 1:\n  here", [RankResult(0, value=1), RankResult(1, failure=death)], FOLDER)
    assert all(isinstance(found, error_class) for error_class in (HangError, TimeoutError, WorkerError))
    assert found.rank == 1
    for part in ("timeout=2.5", "returned already: rank 0", "rank 1:\n  here", str(FOLDER)):
        assert part in str(found)


def test_a_folder_in_the_home_folder_is_shown_without_its_owner_s_name(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    failure = Failure(0, "ValueError", "no", traceback="", time=0.0)
    error = worker_error([RankResult(0, failure=failure)], tmp_path / "runs" / "1")
    # it did not come along itself
    assert isinstance(error, WorkerError)
    assert str(error).startswith("rank 0 stopped with ValueError: no")
    assert str(error).endswith("\n\nAll output: ~/runs/1")
    assert error.folder == str(tmp_path / "runs" / "1")
