"""A rank's whole log is fetched as far as a page can hold it."""

from __future__ import annotations

from accelerate_nb.notebook.panel import end_of


def test_a_log_is_fetched_whole_or_its_end_with_a_word_about_the_rest(tmp_path):
    file = tmp_path / "rank_0.log"
    file.write_bytes(b"abcdef")
    assert end_of(file, 10) == b"abcdef"
    assert end_of(file, 2) == f"... the first 4 bytes are left out here; all of it is in {file} ...\nef".encode()
    assert end_of(tmp_path / "none", 10) == b""
