"""The flags of `%%accelerate` are the settings, read as a person writes them."""

import shlex

import pytest

from accelerate_nb.config import formats
from accelerate_nb.config.magic_args import (
    CellOptions,
    LogsOptions,
    PullOptions,
    cell_flags,
    evaluated_call,
    line_commands,
    names_of,
    ranks_of,
    read,
    read_cell_line,
    read_line,
    session_flags,
)
from accelerate_nb.config.rank_lists import named
from accelerate_nb.config.run_config import all_settings, resolve
from accelerate_nb.config.settings import settings
from accelerate_nb.errors import ConfigurationError
from tests.config.test_formats import ALL


def test_the_arguments_of_a_call_are_evaluated_with_the_names_around_it():
    call = "print(*rates['a'], sep={'x': 1}['x'], end='{rates} $rates')"
    found = evaluated_call(call, {"rates": {"a": [1, 2]}}, "nobody knows.")
    assert found == (print, (1, 2), {"sep": 1, "end": "{rates} $rates"})
    with pytest.raises(ConfigurationError, match=r"^%accelerate run was given train, which nobody knows\.$"):
        evaluated_call("train(1)", {}, "nobody knows.")
    with pytest.raises(NameError, match="rate"):
        evaluated_call("print(rate)", {}, "nobody knows.")


@pytest.mark.parametrize("line", ["-n 4", "-n4", "-n=4", "--num-processes 4", "--num-processes=4", "--num_processes 4"])
def test_the_number_of_processes_can_be_written_as_one_likes(line):
    assert read_cell_line(line) == (CellOptions(), {"num_processes": 4})
    assert read_cell_line("") == (CellOptions(), {})


@pytest.mark.parametrize(
    ("line", "value"),
    [("--cpu", True), ("--no-cpu", False), ("--cpu no", False), ("--cpu=true", True), ("--cpu -n 2", True)],
)
def test_yes_or_no_needs_no_value(line, value):
    assert read_cell_line(line)[1]["cpu"] is value


def test_what_is_requested_of_the_cell_is_distinguished_from_the_settings():
    line = "--ranks 0,2-3 --restart --timeout 1.5 --background --local --mixed-precision BF16"
    options, values = read_cell_line(line)
    assert options == CellOptions(ranks="0,2-3", restart=True, timeout=1.5, background=True, local=True)
    assert values == {"mixed_precision": "bf16"}


def test_settings_of_a_session_are_flags_and_those_of_one_function_are_none():
    of_functions = {setting.name for setting in all_settings()} - {setting.name for setting in session_flags()}
    assert of_functions == {"timeout", "results", "detach", "max_restarts", "restart_delay", "monitor_interval"}
    for name in {flag.name for flag in session_flags()}:
        words = formats.flags({name: ALL[name]})
        assert read_cell_line(shlex.join(words)) == (CellOptions(), {name: ALL[name]})
    nodes = resolve(read_cell_line("--num-nodes 1:2 --hosts a,b")[1], {}).launching
    assert (nodes.min_nodes, nodes.num_nodes) == (1, 2)
    assert resolve(read_cell_line("-n 2 --gradient-accumulation-steps 3 --cpu")[1], {}).launching.num_processes == 2


def test_flags_of_settings_and_of_cells_never_share_a_name():
    names = [cell_flag.name for cell_flag in cell_flags()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mixed-precison bf16", "Did you mean --mixed-precision?"),
        ("--background-run", "Did you mean --background?"),
        ("--no-num-processes", "Did you mean --num-processes?"),
        ("--zzz", "Leave it out. It knows -n, --address, --autolog, --background"),
        ("train.py", "'train.py', which is no flag"),
        ("-n", "--num-processes without a value. It should be a whole number"),
        ("-n many", "--num-processes 'many', but num_processes should be a whole number, at least 1"),
        ("-n 0", "at least 1"),
        ("--mixed-precision bf17", "one of 'no', 'fp16', 'bf16'"),
        ("--timeout --restart", "--timeout without a value"),
        ("--folder 'a", "a quotation mark is open"),
    ],
)
def test_a_mistake_is_reported_with_what_to_do(line, message):
    with pytest.raises(ConfigurationError) as raised:
        read_cell_line(line)
    assert message in str(raised.value)


def test_a_comment_and_quotes_are_read_as_in_a_shell():
    line = "-n 2 --folder 'my runs' --name '#3 base' --tags a#b  # don't"
    given = {"num_processes": 2, "folder": "my runs", "name": "#3 base", "tags": "a#b"}
    assert read_cell_line(line)[1] == given


@pytest.mark.parametrize(
    ("text", "ranks"),
    [(None, None), ("all", None), ("0", (0,)), ("0,2-3", (0, 2, 3)), ("3,1,1", (1, 3)), ("0-3", (0, 1, 2, 3))],
)
def test_ranks_are_numbers_and_ranges(text, ranks):
    assert ranks_of(text, 4) == ranks
    assert ranks is None or ranks_of(named(ranks), 4) == ranks


@pytest.mark.parametrize("text", ["4", "0-4", "a", "1-", "-1", "", "3-2"])
def test_ranks_that_are_not_there_are_reported(text):
    with pytest.raises(ConfigurationError, match="--ranks was given"):
        ranks_of(text, 4)
    # how many a session has, nobody may know yet
    assert ranks_of("0,7", None) == (0, 7)


def test_words_that_are_no_flags_are_left_to_the_caller():
    assert read("loss x --rank 2", settings(PullOptions), "%accelerate pull") == ({"rank": 2}, ["loss", "x"])
    assert read("--lines 3", settings(LogsOptions), "%accelerate logs") == ({"lines": 3}, [])


@pytest.mark.parametrize("word", [line_command.word for line_command in line_commands()])
def test_a_line_is_a_command_and_what_follows_its_word(word):
    command, rest = read_line(f"  {word}   x  y ")
    assert (command.word, rest) == (word, "x  y")


def test_a_line_of_nothing_requests_the_status_and_an_unknown_word_names_its_nearest():
    assert read_line("")[0].word == "status"
    with pytest.raises(ConfigurationError, match="Did you mean push"):
        read_line("pusch x")


def test_names_are_distinguished_from_what_is_none():
    assert names_of("x, y z", "%accelerate push") == ["x", "y", "z"]
    for text in ("", "x.y", "1"):
        with pytest.raises(ConfigurationError, match="Write names of variables"):
            names_of(text, "%accelerate push")
