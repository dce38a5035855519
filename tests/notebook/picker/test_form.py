"""The picker's form amounts to a configuration, and says beside each field why not."""

import os
import re
from html import escape

import ipywidgets
import pytest
import yaml

from accelerate_nb import ConfigurationError, config_picker, notebook_launcher
from accelerate_nb.config import hf_files
from accelerate_nb.config.run_config import all_settings, differing, resolve
from accelerate_nb.config.settings import GROUPS
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.devices.xla import XlaDevices
from accelerate_nb.notebook.picker import html
from accelerate_nb.notebook.picker.form import appraise, initial_settings

LAPTOP = AvailableDevices("cpu", "CPU", 0, 2)
SERVER = AvailableDevices("cuda", "GPU", 2, 32)
TPU = AvailableDevices("xla", "TPU chip", 8, 96, xla=XlaDevices("TPU", 8))


def every(widget, widget_type):
    """All widgets of a kind in a form, in its order."""
    found = [widget] if isinstance(widget, widget_type) else []
    return found + [item for child in getattr(widget, "children", ()) for item in every(child, widget_type)]


def control(picker, name):
    """What one types a setting into."""
    kinds = (ipywidgets.Text, ipywidgets.Dropdown, ipywidgets.Checkbox)
    (found,) = [item for item in every(picker.form, kinds) if f"<code>{name}</code>" in item.description]
    return found


def button(picker, *names):
    (found,) = [item for item in every(picker.form, ipywidgets.Button) if item.description in names]
    return found


def shown(picker):
    """All that a form says."""
    return "\n".join(item.value for item in every(picker.form, ipywidgets.HTML) if "<style" not in item.value)


# ----------------------------------------------------------------------------------------------------------- the form


def test_every_setting_has_a_labelled_field_with_its_help_under_a_known_heading():
    picker = config_picker()
    for setting in all_settings():
        field = control(picker, setting.name)
        assert setting.help == (field.tooltip if hasattr(field, "tooltip") else field.description_tooltip)
        assert setting.group in GROUPS
        for word in setting.unsupported:
            assert word in shown(picker)


def test_an_untouched_form_is_what_nothing_was_set_for_and_shown_by_its_name_at_the_end_of_a_cell():
    picker = config_picker()
    assert picker.value == resolve({}, {})
    assert repr(picker) == picker._repr_mimebundle_()["text/plain"] == "<ConfigPicker: notebook_launcher(train)>"
    assert "application/vnd.jupyter.widget-view+json" in picker._repr_mimebundle_()


@pytest.mark.parametrize(("value", "text"), [(12345.678, "12345.678"), (1234567.0, "1234567"), (1e-7, "1e-07")])
def test_a_number_is_shown_as_it_is(value, text):
    picker = config_picker(timeout=value)
    assert control(picker, "timeout").value == text
    assert picker.value.launching.timeout == value


def test_what_is_typed_is_in_the_value_and_in_every_spelling():
    picker = config_picker()
    control(picker, "num_processes").value = " 2 "
    control(picker, "mixed_precision").value = "bf16"
    control(picker, "cpu").value = True
    settings = {"num_processes": 2, "mixed_precision": "bf16", "cpu": True}
    assert differing(picker.value) == settings
    text = shown(picker)
    for spelled in (
        "notebook_launcher(train, num_processes=2, cpu=True, mixed_precision=&quot;bf16&quot;)",
        "%%accelerate --num-processes 2 --cpu --mixed-precision bf16",
        "accelerate-nb launch --num-processes 2 --cpu --mixed-precision bf16 train.py",
        "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n",
    ):
        assert spelled in text


@pytest.mark.parametrize(
    ("name", "typed"),
    [("num_processes", "two"), ("num_processes", "0"), ("timeout", "-1"), ("use_port", "70000"), ("rdzv_conf", "{")],
)
def test_a_wrong_text_is_reported_beside_its_field_in_the_words_of_a_wrong_argument(name, typed):
    picker = config_picker()
    field = control(picker, name)
    field.value = typed
    (box,) = [item for item in every(picker.form, ipywidgets.VBox) if item.children and item.children[0] is field]
    assert "acc-is-wrong" in box._dom_classes
    assert f"{name} was given as" in box.children[1].value
    (setting,) = [item for item in all_settings() if item.name == name]
    assert "".join(child.value for child in box.children[1:]).count(escape(setting.help)) == 1
    assert 'role="alert"' in box.children[1].value
    with pytest.raises(ConfigurationError, match=f"{name} was given as"):
        _ = picker.value
    assert button(picker, "Save").disabled
    assert button(picker, "Test these settings").disabled
    field.value = ""
    assert "acc-is-wrong" not in box._dom_classes
    assert box.children[1].value == ""
    assert picker.value == resolve({}, {})
    assert not button(picker, "Save").disabled


def test_the_mesh_is_drawn_rank_by_rank():
    degrees = {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2}
    picker = config_picker(num_processes=4, parallelism_config=degrees)
    drawn = shown(picker)
    assert "dp_shard 2 x tp 2: 4 ranks" in drawn
    rows = [[int(rank) for rank in re.findall(r"<td>(\d+)</td>", row)] for row in drawn.split("<tr>")]
    assert [row for row in rows if row] == [[0, 1], [2, 3]]
    picker.set(parallelism_config=None)
    assert "acc-mesh" not in shown(picker)
    assert html.mesh({"dp_shard": 16, "tp": 8}) == '<div class="acc-help">dp_shard 16 x tp 8: 128 ranks</div>'


def is_shown(picker, name):
    """Whether a setting's field is in sight: neither it nor what it stands in is hidden."""
    wanted = control(picker, name)

    def inside(widget):
        if widget.layout.display == "none":
            return False
        return widget is wanted or any(map(inside, getattr(widget, "children", ())))

    return inside(picker.form)


def test_five_settings_come_first_and_all_others_are_unfolded_and_filtered():
    picker = config_picker()
    first = [setting.name for setting in all_settings() if is_shown(picker, setting.name)]
    assert sorted(first) == ["cpu", "gradient_accumulation_steps", "mixed_precision", "num_processes", "timeout"]
    assert "Processes" in control(picker, "num_processes").description
    everything = len(all_settings())
    button(picker, f"▸ All settings ({everything - 5} more)").click()
    assert all(is_shown(picker, setting.name) for setting in all_settings())
    picker.settings.filter.value = "restart Delay"
    found = [setting.name for setting in all_settings() if is_shown(picker, setting.name)]
    assert sorted(found) == sorted([*first, "restart_delay"])
    assert f"1 of {everything - 5} settings" in shown(picker)
    assert ">Sharding<" in shown(picker)
    picker.settings.filter.value = ""
    assert is_shown(picker, "strategy")
    button(picker, "▾ Fewer settings").click()
    assert not is_shown(picker, "strategy")


def test_a_wrong_setting_that_is_folded_or_filtered_away_is_shown():
    picker = config_picker()
    control(picker, "node_rank").value = "2"
    assert "node_rank=2 was given for num_nodes=1" in shown(picker)
    assert is_shown(picker, "node_rank")
    control(picker, "node_rank").value = ""
    picker.settings.filter.value = "strategy"
    assert not is_shown(picker, "node_rank")
    control(picker, "node_rank").value = "2"
    assert is_shown(picker, "node_rank")


def test_what_is_left_at_its_default_is_marked_so_until_it_is_changed(default_file):
    default_file.write_text("mixed_precision: bf16\n")
    picker = config_picker()
    mark = '<span class="acc-origin">default</span>'
    unset = len(all_settings()) - 1
    assert shown(picker).count(mark) == unset
    control(picker, "num_processes").value = "2"
    assert shown(picker).count(mark) == unset - 1
    control(picker, "num_processes").value = ""
    assert shown(picker).count(mark) == unset


def test_the_cell_that_the_form_spells_can_be_inserted_and_none_while_something_is_wrong():
    picker = config_picker(num_processes=2)
    cell = "from accelerate_nb import notebook_launcher\n\nnotebook_launcher(train, num_processes=2)"
    assert picker.insert.code == cell
    control(picker, "num_processes").value = "0"
    assert picker.insert.code == ""


def test_what_people_type_is_no_html():
    picker = config_picker(folder="<b onclick=x>")
    control(picker, "num_processes").value = "<script>"
    assert "<script>" not in shown(picker)
    assert "<b onclick" not in shown(picker)


def test_a_setting_that_is_unknown_or_wrong_in_a_call_is_raised_and_changes_nothing():
    with pytest.raises(ConfigurationError, match="Did you mean num_processes"):
        config_picker(num_proceses=2)
    picker = config_picker(num_processes=2)
    with pytest.raises(ConfigurationError, match="timeout was given as"):
        picker.set(num_processes=3, timeout="soon")
    assert picker.value.launching.num_processes == 2


# ------------------------------------------------------------------------------------------- what is said elsewhere


def test_the_form_begins_with_the_environment_and_the_file_and_reports_it(default_file, monkeypatch):
    default_file.write_text("num_processes: 2\nmixed_precision: fp16\nuse_cpu: true\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    picker = config_picker(gradient_accumulation_steps=4)
    expected = {"num_processes": 2, "cpu": True, "mixed_precision": "bf16", "gradient_accumulation_steps": 4}
    assert differing(picker.value) == expected
    assert shown(picker).count(f"from {default_file}") == 2
    assert "from the variable ACCELERATE_MIXED_PRECISION" in shown(picker)
    assert "by you" in shown(picker)
    control(picker, "num_processes").value = "3"
    assert shown(picker).count(f"from {default_file}") == 1
    button(picker, "Reset").click()
    assert picker.value == resolve({}, os.environ, hf_files.read(default_file))


def test_a_call_takes_back_what_is_set_elsewhere(default_file):
    default_file.write_text("mixed_precision: bf16\nuse_cpu: true\n")
    picker = config_picker(cpu=False, mixed_precision="no")
    assert "notebook_launcher(train, cpu=False, mixed_precision=&quot;no&quot;)" in shown(picker)
    picker.set(mixed_precision=None)
    assert "mixed_precision is left open here, but set by the environment or the file" in shown(picker)


@pytest.mark.parametrize("text", ["num_processes: [", "num_processes: x\nuse_cpu: true", "distributed_type: MULTI_NPU"])
def test_a_broken_file_is_reported_and_the_form_works(default_file, text):
    default_file.write_text(text)
    picker = config_picker()
    assert str(default_file) in shown(picker) or "in the configuration file is &#x27;x&#x27;" in shown(picker)
    assert picker.value.launching.num_processes is None
    assert picker.value.launching.cpu is ("use_cpu" in text)


def test_a_broken_variable_is_reported_once_and_the_form_works(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "float7")
    picker = config_picker()
    assert "The variable ACCELERATE_MIXED_PRECISION is" in shown(picker)
    assert picker.value == resolve({}, {})
    control(picker, "node_rank").value = "2"
    said = re.findall(r'role="alert">(.*?)</div>', shown(picker))
    assert len(said) == len(set(said)) == 2


# ----------------------------------------------------------------------------------------------------- other machines


def test_a_machine_with_gpus_is_named_as_accelerate_names_it():
    assert appraise({}, SERVER, {}).content["distributed_type"] == "MULTI_GPU"
    assert appraise({"num_processes": "1"}, SERVER, {}).content["distributed_type"] == "NO"
    assert appraise({}, AvailableDevices("xpu", "GPU", 2, 8), {}).content["distributed_type"] == "MULTI_XPU"
    assert appraise({}, AvailableDevices("mps", "Apple GPU", 1, 8), {}).content["distributed_type"] == "NO"


def test_a_machine_with_a_tpu_gets_a_file_that_leads_to_the_same_launch():
    for typed in ({}, {"num_processes": "1"}, {"engine": "xla"}):
        found = appraise(typed, TPU, {})
        assert found.content["distributed_type"] == "XLA"
        assert resolve({}, {}, found.content) == found.config
    assert found.choice.why.startswith("8 of 8 TPU chips; ")


def test_a_tpu_is_shown_as_what_the_machine_has():
    assert "8 TPU chips" in html.title(TPU, 1 << 30, [])
    missing = XlaDevices("TPU", 0, trouble="No chip.")
    devices = AvailableDevices("xla", missing.label, 0, 96, xla=missing)
    assert "no TPU chip to compute on" in html.title(devices, 1 << 30, [])
    assert appraise({}, devices, {}).general == ("No chip.",)
    assert appraise({"cpu": True}, devices, {}).config is not None


def test_what_cells_can_not_set_is_left_out_of_their_first_line_and_reported():
    found = appraise({"max_restarts": "2", "debug": True, "detach": True, "timeout": "9"}, LAPTOP, {})
    assert found.magic == "%%accelerate --timeout 9.0 --detach --debug"
    assert found.notes["magic"].startswith("max_restarts is of no meaning to cells")


def test_what_accelerate_does_not_read_of_a_file_is_reported():
    found = appraise({"panel": "off"}, LAPTOP, {})
    assert "#| panel: 'off'" in found.file
    assert "panel is in comments, which accelerate_nb alone reads" in found.notes["file"]
    assert "file" not in appraise({"cpu": True}, LAPTOP, {}).notes
    assert "file" not in appraise({"num_processes": "2"}, LAPTOP, {}).notes


def test_begin_never_raises(tmp_path):
    assert "does not exist" in initial_settings({}, str(tmp_path / "gone.yaml")).trouble[0]


# ----------------------------------------------------------------------------------------------------- the file


def test_a_saved_file_is_what_every_launch_takes(default_file):
    picker = config_picker(num_processes=2, mixed_precision="bf16", cpu=True)
    button(picker, "Save").click()
    assert f"Saved to {default_file}" in shown(picker)
    assert hf_files.find(os.environ) == default_file
    assert resolve({}, {}, hf_files.read(default_file)) == picker.value
    picker.set(num_processes=3)
    button(picker, "Save").click()  # its own file is not asked about
    assert hf_files.read(default_file)["num_processes"] == 3


def test_a_file_of_somebody_else_needs_consent_to_what_is_saved_and_keeps_its_own_keys(default_file):
    default_file.write_text("# mine\nnum_processes: 4\nmain_training_function: run\n")
    picker = config_picker(num_processes=2)
    button(picker, "Save").click()
    assert yaml.safe_load(default_file.read_text())["num_processes"] == 4
    assert "changes num_processes, keeps main_training_function, leaves out its comments" in shown(picker)
    # what would be agreed to needs consent again when it changes
    control(picker, "num_processes").value = "3"
    button(picker, "Save").click()
    assert hf_files.read(default_file)["num_processes"] == 4
    button(picker, "Save over it").click()
    assert hf_files.read(default_file)["num_processes"] == 3
    assert hf_files.read(default_file)["main_training_function"] == "run"
    assert button(picker, "Save")


@pytest.mark.parametrize("text", ["num_processes: [\n", "distributed_type: MULTI_NPU\n"])
def test_a_file_that_is_not_understood_is_not_written_over(default_file, text):
    default_file.write_text(text)
    picker = config_picker(config_file="", num_processes=2)
    button(picker, "Save").click()
    assert 'class="acc-wrong"' in picker.file.status
    assert default_file.read_text() == text


def test_another_file_is_loaded_and_saved(tmp_path, default_file):
    other = tmp_path / "other.yaml"
    other.write_text("num_processes: 2\nuse_cpu: true\n")
    picker = config_picker()
    picker.file.path.value = str(other)
    button(picker, "Load").click()
    assert differing(picker.value) == {"num_processes": 2, "cpu": True}
    assert f"Loaded from {other}" in picker.file.status
    control(picker, "num_processes").value = "1"
    button(picker, "Save").click()
    assert f"Launch with config_file={str(other)!r}" in picker.file.status.replace("&#x27;", "'")
    assert config_picker(config_file=other).value == picker.value


@pytest.mark.parametrize(("name", "problem"), [("gone.yaml", "does not exist"), ("", "is a folder")])
def test_a_file_that_cannot_be_loaded_is_reported_and_changes_nothing(tmp_path, name, problem):
    picker = config_picker(num_processes=2)
    picker.file.path.value = str(tmp_path / name)
    before = picker.value
    button(picker, "Load").click()
    assert problem in picker.file.status
    assert picker.value == before


# ---------------------------------------------------------------------------------------------------- trying it


@pytest.mark.slow
def test_a_press_tests_the_settings_with_real_workers():
    picker = config_picker(num_processes=2, cpu=True)
    assert picker.checks == []
    button(picker, "Test these settings").click()
    checks = picker.test.wait(60)
    assert {check.state for check in checks} == {"passed"}
    assert "All 7 checks passed." in shown(picker)
    assert not picker.test.begin.disabled
    assert picker.test.end.disabled


def test_the_value_feeds_a_launch():
    picker = config_picker(num_processes=2, cpu=True, mixed_precision="bf16")
    names = ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
    assert notebook_launcher(lambda: [os.environ[name] for name in names], config=picker.value) == ["2", "bf16"]
