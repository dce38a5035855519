"""Each setting is said once, and can be said in six places: a call, a flag, a variable, a file, an answer, a form."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ipywidgets
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from accelerate_nb import config_picker
from accelerate_nb.cli.commands import launch
from accelerate_nb.cli.commands.config import FIRST, prompt
from accelerate_nb.cli.launching.request import read_request
from accelerate_nb.cli.parser import CliParser
from accelerate_nb.config import formats, hf_files
from accelerate_nb.config.run_config import RunConfig, all_settings, differing, resolve, values
from accelerate_nb.config.settings import GROUPS, Setting
from accelerate_nb.config.value_types import Boolean, OneOf
from accelerate_nb.devices.probe import AvailableDevices
from tests.config.test_formats import ALL as ANY

LAPTOP = AvailableDevices("cpu", "CPU", 0, 2)
SERVER = AvailableDevices("cuda", "GPU", 8, 64)
# Values other than the defaults, with which a launch on one machine is possible also all together.
ALL = {**ANY, "engine": "local"}
DOWN, ENTER, SPACE, CLEAR = "\x1b[B", "\r", " ", "\x15"


def as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def only(setting: Setting) -> RunConfig:
    """What a run should be where this setting alone is said."""
    return resolve({setting.name: ALL[setting.name]}, {})


@pytest.fixture(autouse=True)
def _no_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_no_two_settings_share_a_name_anywhere() -> None:
    for names in ("name", "flag"):
        spellings = [getattr(setting, names) for setting in all_settings()]
        assert len(set(spellings)) == len(spellings)
    for names in ("variables", "keys"):
        spellings = [name for setting in all_settings() for name in getattr(setting, names)]
        assert len(set(spellings)) == len(spellings)


def test_each_setting_is_a_flag_of_the_launch() -> None:
    parser = CliParser(prog="accelerate-nb launch")
    launch.configure(parser)
    for setting in all_settings():
        arguments = parser.parse_args([*formats.flags({setting.name: ALL[setting.name]}), "train.py"])
        launch._take_seconds(arguments)
        assert arguments.what == ["train.py"], setting.name
        assert read_request(arguments).config == only(setting), setting.name


def test_each_setting_has_variables_of_the_environment() -> None:
    for setting in all_settings():
        for variable in setting.variables:
            assert resolve({}, {variable: as_text(ALL[setting.name])}) == only(setting), variable


def test_each_setting_is_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for setting in all_settings():
        for key in setting.keys:
            path.write_text(f"{key}: {json.dumps(ALL[setting.name])}\n")
            assert resolve({}, {}, hf_files.read(path)) == only(setting), key


def in_the_order_of_questions() -> Iterator[Setting]:
    known = {setting.name: setting for setting in all_settings()}
    yield from (known[name] for name in FIRST)
    rest = [setting for setting in all_settings() if setting.name not in FIRST]
    yield from (item for group in GROUPS for item in rest if item.group == group)


def answer(setting: Setting) -> str:
    """The keys that answer a setting's question with another value than its default."""
    if isinstance(setting.value_type, (Boolean, OneOf)):
        listed = [*([None] if setting.nullable else []), *(setting.choices or (True, False))]
        return DOWN * ((listed.index(ALL[setting.name]) - listed.index(setting.default)) % len(listed)) + ENTER
    return CLEAR + as_text(ALL[setting.name]) + ENTER


def test_each_setting_has_a_question_whose_answer_counts() -> None:
    groups = len({setting.group for setting in all_settings() if setting.name not in FIRST})
    answers = [answer(in_the_order_of_question) for in_the_order_of_question in in_the_order_of_questions()]
    answers.insert(len(FIRST), (SPACE + DOWN) * groups + ENTER)
    # words that are not offered yet stand at the end of a list, and the cursor passes over them
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("".join(answers))
        _, outlook = prompt(values(resolve({}, {})), LAPTOP, can_fork=True)
    assert outlook.config == resolve(ALL, {})
    assert differing(outlook.config).keys() | {"num_nodes", "node_rank"} == {setting.name for setting in all_settings()}


def controls(widget: Any) -> dict[str, Any]:
    """What one types into, in a form and all that it holds, by the names beside it."""
    kinds = (ipywidgets.Text, ipywidgets.Dropdown, ipywidgets.Checkbox)
    name = re.search(r"<code>(\w+)</code>", getattr(widget, "description", ""))
    found = {name[1]: widget} if isinstance(widget, kinds) and name else {}
    return found | {name: item for child in getattr(widget, "children", ()) for name, item in controls(child).items()}


def test_each_setting_has_a_field_whose_value_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # a machine that has the GPUs that are named
    monkeypatch.setattr("accelerate_nb.notebook.picker.form.probe", lambda: SERVER)
    picker = config_picker()
    fields = controls(picker.form)
    for setting in all_settings():
        field, value = fields[setting.name], ALL[setting.name]
        before = field.value
        field.value = as_text(value) if isinstance(field, ipywidgets.Text) else value
        assert picker.value == only(setting), setting.name
        field.value = before
    assert picker.value == resolve({}, {})
