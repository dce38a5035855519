"""What other packages import of Accelerate's command line is there under the same module paths, and does the same."""

import os
from argparse import ArgumentParser
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config import load_config_from_file as load_theirs

from accelerate_nb.commands.config import load_config_from_file
from accelerate_nb.commands.launch import launch_command, launch_command_parser
from accelerate_nb.config import hf_files
from accelerate_nb.errors import ConfigurationError
from tests.processes import python

CONFIG = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU"}
CONFIG |= {"mixed_precision": "bf16", "num_processes": 2}


def test_a_loaded_configuration_reports_of_its_keys_what_it_reports_under_accelerate(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "use_cpu": True, "dynamo_config": {"dynamo_backend": "EAGER"}}))
    ours, theirs = load_config_from_file(path), load_theirs(str(path))
    assert vars(ours) == vars(theirs)
    assert ours.to_dict() == theirs.to_dict()


def test_a_configuration_that_is_not_there_is_the_error_that_it_is_under_accelerate(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_config_from_file(tmp_path / "none.yaml")


def test_the_default_file_is_a_text_that_names_where_launches_look() -> None:
    # it is made by the import
    code = "from accelerate_nb.commands.config import default_config_file as file; print(type(file).__name__, file)"
    assert python("-c", code, check=True).stdout == f"str {hf_files.default_path(os.environ)}\n"


def test_a_launch_by_its_parser_runs_a_script_and_ends_alike(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:])\nsys.exit(int(sys.argv[-1]))\n")
    words = ["--cpu", "--num_processes", "2", "--config_file", "", str(script), "--epochs"]
    launch_command(launch_command_parser().parse_args([*words, "0"]))
    assert "2 ['--epochs', '0']" in capfd.readouterr().out
    with pytest.raises(SystemExit) as ended:
        launch_command(launch_command_parser().parse_args([*words, "3"]))
    assert ended.value.code == 3


def test_the_parser_can_be_one_among_others() -> None:
    parser = ArgumentParser()
    launch_command_parser(parser.add_subparsers())
    assert parser.parse_args(["launch", "--cpu", "train.py"]).func is launch_command


def test_a_mistake_in_a_line_is_reported() -> None:
    with pytest.raises(ConfigurationError, match="unrecognized arguments: --num_proceses"):
        launch_command_parser().parse_args(["--num_proceses", "2"])


IN_A_PROCESS_OF_ITS_OWN = """
import sys
from tests.hf_suite.alias import install
install()
from transformers.cli.system import env
env(sys.argv[1])
"""


@pytest.mark.slow
def test_transformers_reports_its_environment_with_this_package_in_the_place_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    output = python("-c", IN_A_PROCESS_OF_ITS_OWN, path, check=True).stdout
    assert "- mixed_precision: bf16" in output
    assert "- num_processes: 2" in output
