"""Flags are completed as far as they are written, and told with their help."""

from accelerate_nb.config.magic_args import cell_flags
from accelerate_nb.notebook.cells.completion import completions, help_of


def test_an_empty_line_offers_every_flag():
    assert completions("", cell_flags(), ["word"]) == ["word", *(cell_flag.flag for cell_flag in cell_flags())]


def test_the_help_lists_each_flag_its_choices_and_its_default():
    text = help_of(cell_flags())
    assert "  -n, --num-processes N\n      Number of processes" in text
    assert "--mixed-precision {no,fp16,bf16,fp8}" in text
    assert "(default: auto)" in text
    assert all(cell_flag.flag in text and cell_flag.help in text for cell_flag in cell_flags())
