"""Each setting is said once, and can be said in six places: a call, a flag, a variable, a file, an answer, a form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ipywidgets
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from accelerate_nb import config_picker
from accelerate_nb.cli import launch
from accelerate_nb.cli.parser import Parser
from accelerate_nb.cli.questions import FIRST, ask
from accelerate_nb.config import files, spelling
from accelerate_nb.config.fields import GROUPS, Setting
from accelerate_nb.config.kinds import Ids, Number, OneOf, Table, Text, Whole, YesNo
from accelerate_nb.config.mesh import Axes
from accelerate_nb.config.run import RunConfig, all_settings, differing, resolve, values
from accelerate_nb.devices.base import Devices
from accelerate_nb.notebook.functions import resolved

LAPTOP = Devices("cpu", "CPU", 0, 2)
# Values with which a launch on one machine is possible, also all together.
POSSIBLE = {
    "engine": "local",
    "num_nodes": 1,
    "node_rank": 0,
    "master_addr": "localhost",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "[::1]:9",
}
DOWN, ENTER, SPACE, CLEAR = "\x1b[B", "\r", " ", "\x15"


def another(one: Setting) -> Any:
    """A value that is not the default, where one machine has another."""
    if one.name in POSSIBLE:
        return POSSIBLE[one.name]
    match one.kind:
        case OneOf():
            return next(word for word in one.choices if word != one.default)
        case YesNo():
            return not one.default
        case Whole():
            return int(one.kind.minimum or 0) + 2
        case Number():
            return 7.5
        case Table():
            return {"timeout": "30"}
        case Ids():
            return "0,2"
        case Axes():
            return "data=2,fsdp"
        case Text():
            return "runs of ${rank}"
    raise AssertionError(f"{one.name} is of a kind that this test does not know")


def as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


ANOTHER = {one.name: another(one) for one in all_settings()}
each = pytest.mark.parametrize("one", all_settings(), ids=lambda one: one.name)


def only(one: Setting) -> RunConfig:
    """What a run should be where this setting alone is said."""
    return resolve({one.name: ANOTHER[one.name]}, {})


@pytest.fixture(autouse=True)
def _nothing_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_no_two_settings_share_a_name_anywhere() -> None:
    for names in ("name", "flag"):
        said = [getattr(one, names) for one in all_settings()]
        assert len(set(said)) == len(said)
    for names in ("variables", "keys"):
        said = [name for one in all_settings() for name in getattr(one, names)]
        assert len(set(said)) == len(said)


@each
def test_each_setting_can_be_said_in_a_call(one: Setting) -> None:
    assert resolved({one.name: ANOTHER[one.name]}, "") == only(one)


@each
def test_each_setting_is_a_flag_of_the_launch(one: Setting) -> None:
    parser = Parser(prog="accelerate-nb launch")
    launch.configure(parser)
    said = parser.parse_args([*spelling.flags({one.name: ANOTHER[one.name]}), "train.py"])
    launch._take_seconds(said)
    assert said.what == ["train.py"]
    assert launch._asked(said).config == only(one)


@each
def test_each_setting_has_variables_of_the_environment(one: Setting) -> None:
    for variable in one.variables:
        assert resolve({}, {variable: as_text(ANOTHER[one.name])}) == only(one)


@each
def test_each_setting_is_kept_in_a_file(one: Setting, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    files.draft(path, spelling.keys(only(one), "NO")).write()
    assert resolve({}, {}, files.read(path)) == only(one)
    for key in one.keys:
        path.write_text(f"{key}: {json.dumps(ANOTHER[one.name])}\n")
        assert resolve({}, {}, files.read(path)) == only(one)


def in_the_order_of_questions() -> Iterator[Setting]:
    known = {one.name: one for one in all_settings()}
    yield from (known[name] for name in FIRST)
    rest = [one for one in all_settings() if one.name not in FIRST]
    yield from (one for group in GROUPS for one in rest if one.group == group)


def answer(one: Setting) -> str:
    """The keys that answer a setting's question with another value than its default."""
    if isinstance(one.kind, (YesNo, OneOf)):
        listed = [*([None] if one.nullable else []), *(one.choices or (True, False))]
        return DOWN * ((listed.index(ANOTHER[one.name]) - listed.index(one.default)) % len(listed)) + ENTER
    return CLEAR + as_text(ANOTHER[one.name]) + ENTER


def test_each_setting_has_a_question_whose_answer_counts() -> None:
    groups = len({one.group for one in all_settings() if one.name not in FIRST})
    answers = [answer(one) for one in in_the_order_of_questions()]
    answers.insert(len(FIRST), (SPACE + DOWN) * groups + ENTER)
    # words that are not offered yet stand at the end of a list, and the cursor passes over them
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("".join(answers))
        _, outlook = ask(values(resolve({}, {})), LAPTOP, can_fork=True)
    assert outlook.config == resolve(ANOTHER, {})
    assert differing(outlook.config).keys() | {"num_nodes", "node_rank"} == {one.name for one in all_settings()}


def controls(widget: Any) -> dict[str, Any]:
    """What one types into, in a form and all that it holds, by the names beside it."""
    kinds = (ipywidgets.Text, ipywidgets.Dropdown, ipywidgets.Checkbox)
    own = {widget.description: widget} if isinstance(widget, kinds) else {}
    return own | {name: one for child in getattr(widget, "children", ()) for name, one in controls(child).items()}


def test_each_setting_has_a_field_whose_value_counts() -> None:
    picker = config_picker()
    fields = controls(picker.form)
    for one in all_settings():
        field, value = fields[one.name], ANOTHER[one.name]
        before = field.value
        field.value = as_text(value) if isinstance(field, ipywidgets.Text) else value
        assert picker.value == only(one), one.name
        field.value = before
    assert picker.value == resolve({}, {})
