"""A file is written whole, or not at all."""

from __future__ import annotations

import pytest

from accelerate_nb.config.atomic_write import write_whole


def test_a_text_that_can_not_be_written_leaves_the_file_and_nothing_beside_it(tmp_path):
    place = tmp_path / "train.py"
    place.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(place, "x" * 100_000 + "\ud800")
    assert place.read_text() == "before"
    assert [*tmp_path.iterdir()] == [place]


def test_a_link_goes_on_to_lead_to_its_file_with_the_rights_that_it_had(tmp_path):
    place, link = tmp_path / "train.py", tmp_path / "link.py"
    place.write_text("before")
    place.chmod(0o750)
    link.symlink_to(place)
    write_whole(link, "now\n")
    assert link.is_symlink()
    assert place.read_text() == "now\n"
    assert place.stat().st_mode & 0o777 == 0o750
