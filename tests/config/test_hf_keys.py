"""What Accelerate's configuration files say of TPUs is read, and leads to a launch through torch_xla."""

import pytest
from accelerate.commands.config.config_args import ClusterConfig

from accelerate_nb.config import hf_files, hf_keys
from accelerate_nb.config.hf_keys import TpusConfig
from accelerate_nb.config.run_config import origins, resolve
from accelerate_nb.errors import ConfigurationError

FOR_TPUS = {"distributed_type": "XLA", "num_processes": 4}


def test_the_file_that_accelerates_questionnaire_writes_for_a_pod_is_read_whole(tmp_path):
    path = tmp_path / "pod.yaml"
    ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="XLA",
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=8,
        main_training_function="train",
        downcast_bf16="no",
        tpu_name="mine",
        tpu_zone="us-central2-b",
        tpu_use_cluster=True,
        tpu_use_sudo=False,
        tpu_vm=[""],
        tpu_env=["A=1", "B=two words"],
    ).to_yaml_file(str(path))
    content = hf_files.read(path)
    assert hf_keys.tpus_of(content) == TpusConfig(
        function="train", is_pod=True, name="mine", zone="us-central2-b", environment=("A=1", "B=two words")
    )
    config = resolve({}, {}, content)
    assert (config.launching.engine, config.launching.num_processes) == ("xla", None)
    assert config.training.mixed_precision == "bf16"


def test_a_file_that_sets_nothing_of_tpus_leaves_the_defaults():
    assert hf_keys.tpus_of({"num_processes": 2, "tpu_env": [""], "tpu_name": ""}) == TpusConfig()
    assert resolve({}, {}, {"num_processes": 2}).launching.engine == "auto"


@pytest.mark.parametrize("distributed_type", ["XLA", "TPU", "xla"])
def test_a_file_for_tpus_takes_all_cores_as_it_does_with_accelerate(distributed_type):
    found = origins({}, {}, {"distributed_type": distributed_type, "num_processes": 4})
    assert (found["engine"].value, found["engine"].source) == ("xla", "the configuration file")
    assert found["num_processes"].value is None


def test_a_call_and_a_number_that_this_packages_own_file_names_hold():
    config = resolve({"engine": "local", "num_processes": 2}, {}, FOR_TPUS)
    assert (config.launching.engine, config.launching.num_processes) == ("local", 2)
    assert resolve({}, {}, {**FOR_TPUS, "num_processes": 1, "engine": "xla"}).launching.num_processes == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "file"),
    [({"cpu": True}, {}, {}), ({}, {"ACCELERATE_USE_CPU": "yes"}, {}), ({}, {}, {"use_cpu": True})],
    ids=["call", "variable", "file"],
)
def test_whoever_requests_the_cpu_gets_it_with_a_file_for_tpus_too(arguments, environment, file):
    config = resolve(arguments, environment, {**FOR_TPUS, **file})
    assert (config.launching.engine, config.launching.cpu, config.launching.num_processes) == ("auto", True, 4)


def test_what_no_value_can_be_is_named_with_its_key():
    with pytest.raises(ConfigurationError, match="tpu_use_sudo in the configuration file is 'perhaps'"):
        hf_keys.tpus_of({"tpu_use_sudo": "perhaps"})
    with pytest.raises(ConfigurationError, match="There is no key '1'"):
        resolve({}, {}, {"parallelism_config": {1: 2}})
    assert hf_keys.apart({"dynamo_config": {1: 2}}) == {"dynamo_1": 2}
