"""The unit tests of Hugging Face Accelerate pass where `accelerate` is this package."""

import os
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.processes import python

FOLDER = Path(__file__).resolve().parent
# An internal function that they import, without which the whole file could not be read.
INTERNAL = "    _refuse_recurrent_layers_under_sequence_parallelism,\n"
NOT_RUN_HERE = {
    "test_cli.py": "reads files of settings that are not in the source distribution",
    "test_examples.py": "runs examples that are not in the source distribution",
    "test_launch.py": "calls internal functions of the command `accelerate launch`",
    "test_sagemaker.py": "SageMaker is not offered",
}
FAIL_HERE = {
    "AcceleratorTester::test_accelerator_state_after_reset": "an Accelerator keeps its facts when the state is reset",
    "MultiCPUTester::test_cpu": "the same",
    "AcceleratorTester::test_prepare_model_8bit_cpu_offload_raises_valueerror_not_typeerror": "replaces an internal function",
    "RefuseRecurrentLayersTester::test_allows_full_attention": "calls an internal function",
    "RefuseRecurrentLayersTester::test_allows_models_without_layer_types": "the same",
    "RefuseRecurrentLayersTester::test_refuses_linear_attention": "the same",
    "ModelingUtilsTester::test_set_module_tensor_checks_shape": "compares the words of a message",
    "UtilsTester::test_honor_type": "the same",
    "AcceleratorTester::test_free_memory_dereferences_prepared_components": "measures the free memory of the whole machine",
    "UtilsTester::test_convert_dict_to_env_variables": "expects the logger to be named accelerate",
    "ModelingUtilsTester::test_infer_auto_device_map_on_t0pp": "downloads a model",
    "TestTorchAO::test_can_prepare_model_single_accelerator": "fails with Accelerate, too, on a machine without a GPU",
    "TestTorchAO::test_can_prepare_model_single_gpu_from_config": "the same",
    "TestTorchAO::test_can_prepare_model_single_gpu_from_config_with_additional_params": "the same",
}


@pytest.fixture
def their_tests(tmp_path: Path) -> Path:
    """The tests of the installed version, out of its source distribution."""
    source = f"accelerate=={version('accelerate')}"
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "accelerate", "--dest", str(tmp_path)]
    found = python("-m", "pip", "download", "-q", *options, source, limit=300)
    if found.returncode:
        pytest.skip(f"the source of {source} can't be downloaded: {found.stderr[-200:]}")
    with tarfile.open(next(tmp_path.glob("accelerate-*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    tests = next(tmp_path.glob("accelerate-*/tests"))
    file = tests / "test_big_modeling.py"
    text = file.read_text()
    assert INTERNAL in text
    file.write_text(text.replace(INTERNAL, ""))
    return tests


@pytest.mark.timeout(1000)  # some 700 tests, in one process of their own
def test_their_unit_tests_pass(their_tests: Path) -> None:
    environment = {
        "PYTHONPATH": os.pathsep.join([str(FOLDER / "everywhere"), str(FOLDER.parents[1])]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    ignored = [f"--ignore={their_tests / name}" for name in NOT_RUN_HERE]
    words = ("-m", "pytest", their_tests, "-q", "-p", "no:cacheprovider", "--tb=line", *ignored)
    ran = python(*words, folder=their_tests.parent, limit=900, **environment)
    lines = ran.stdout.splitlines()
    failed = {line.split(" - ")[0].split("::", 1)[-1] for line in lines if line.startswith(("FAILED ", "ERROR "))}
    assert not failed - FAIL_HERE.keys(), ran.stdout[-5000:]
    assert " passed" in lines[-1], ran.stdout[-5000:] + ran.stderr[-2000:]
