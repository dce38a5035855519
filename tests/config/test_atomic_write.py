"""A file is written whole, or not at all."""

import pytest

from accelerate_nb.config.atomic_write import write_whole


def test_a_text_that_can_not_be_written_leaves_the_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "x" * 100_000 + "\ud800")
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_a_link_goes_on_to_lead_to_its_file_with_the_rights_that_it_had(tmp_path):
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    path.write_text("before")
    path.chmod(0o750)
    link.symlink_to(path)
    write_whole(link, "now\n")
    assert link.is_symlink()
    assert path.read_text() == "now\n"
    assert path.stat().st_mode & 0o777 == 0o750
