"""What the environment says of a launch."""

import os
import sys

import pytest

from accelerate_nb.config.environment import already_launched, requests_tpu, runs_folder, set_variables


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, True),
        ({"RANK": "3", "WORLD_SIZE": "4"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, True),
        ({"WORLD_SIZE": "2"}, False),
        ({"RANK": "", "WORLD_SIZE": ""}, False),
    ],
)
def test_a_world_that_a_notebook_wrote_for_itself_is_no_launch(environment, launched):
    assert already_launched(environment) is launched


def test_runs_are_kept_in_the_users_cache(tmp_path):
    assert runs_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "accelerate_nb_runs"
    assert runs_folder({"XDG_CACHE_HOME": str(tmp_path / "new")}) == tmp_path / "new" / "accelerate_nb_runs"
    if sys.platform == "linux":
        assert runs_folder({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "accelerate_nb_runs"
    # where a folder is requested, the cache is not looked at
    unreadable = str(tmp_path / ("x" * 300))
    assert runs_folder({"XDG_CACHE_HOME": unreadable}, str(tmp_path)) == tmp_path


@pytest.mark.parametrize("environment", [{}, {"HOME": "/dev/null"}])
def test_without_a_cache_to_write_to_runs_are_kept_in_a_temporary_folder_of_the_users_own(environment):
    folder = runs_folder(environment)
    assert folder.name.startswith("accelerate_nb_runs-")
    assert os.access(folder.parent, os.W_OK)


def test_what_the_environment_sets_for_a_while_is_taken_back():
    environment = {"A": "1", "B": "2"}
    with pytest.raises(KeyError), set_variables({"A": "3", "C": "4"}, environment):
        assert environment == {"A": "3", "B": "2", "C": "4"}
        raise KeyError
    assert environment == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("environment", "requested"),
    [
        ({"PJRT_DEVICE": "TPU"}, True),
        ({"TPU_NAME": ""}, True),
        ({"COLAB_TPU_1VM": "1"}, True),
        ({"TPU_ACCELERATOR_TYPE": "v5e-1"}, True),
        ({"PJRT_DEVICE": "CPU"}, False),
        ({"PJRT_DEVICE": "CPU", "TPU_NAME": "mine"}, False),
        # on Colab's machines without a TPU
        ({"COLAB_TPU_1VM": ""}, False),
        ({}, False),
    ],
)
def test_a_tpu_is_seen_in_the_environment(environment, requested):
    assert requests_tpu(environment) is requested
