"""What ranks note is there for the next attempt of their run, and for no other run."""

from accelerate_nb.config.environment import attempt_variables
from accelerate_nb.rank.attempt_notes import leave_note, notes


def test_notes_reach_the_next_attempt_each_once_whatever_was_cut_off(tmp_path, monkeypatch):
    for attempt in (0, 1):
        for name, value in attempt_variables(tmp_path, attempt).items():
            monkeypatch.setenv(name, value)
        leave_note("size", value=8)
        leave_note("size", value=8)
        leave_note("other", value="é")
        with (tmp_path / "attempt_notes.jsonl").open("a") as file:
            file.write('{"topic": "size", "att\n[]\n')
    assert [note["value"] for note in notes("size", former=True)] == [8]
    assert [note["attempt"] for note in notes("size", former=False)] == [0, 1]


def test_a_process_of_no_run_leaves_and_finds_none(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_NB_RUN_FOLDER", raising=False)
    leave_note("size", value=8)
    assert notes("size", former=False) == []
    monkeypatch.setenv("ACCELERATE_NB_RUN_FOLDER", str(tmp_path / "removed"))
    monkeypatch.setenv("ACCELERATE_NB_ATTEMPT", "0")
    leave_note("size", value=8)
    assert notes("size", former=False) == []
