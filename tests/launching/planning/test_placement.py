"""The choice of what places the workers follows from the wish for this machine; what does not fit is said."""

from contextlib import closing

import pytest

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.devices.xla import XlaDevices
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.run_folder import RunRecorder, hold_lock, new_folder
from accelerate_nb.launching.planning.placement import Placement, accelerates_word, choose, devices_of, taken

LAPTOP = AvailableDevices("cpu", "CPU", 0, 2)
SERVER = AvailableDevices("cuda", "GPU", 4, 64)
ONE_GPU = AvailableDevices("cuda", "GPU", 1, 8)
HALF = AvailableDevices("cuda", "GPU", 2, 64, physical=4, variable="CUDA_VISIBLE_DEVICES")


def through(device, count, cores=96, **more):
    found = XlaDevices(device, count, **more)
    return AvailableDevices("xla", found.label, count, cores, xla=found)


KAGGLE, V4, COLAB = through("TPU", 8), through("TPU", 4), through("TPU", 1)
XLA_CPU = through("CPU", 2)
# machines with torch_xla on which nothing asks for it
BARE = AvailableDevices("cpu", "CPU", 0, 2, xla=XlaDevices("CPU", 1, requested=False))
BOTH = AvailableDevices("cuda", "GPU", 4, 64, xla=XlaDevices("CPU", 1, requested=False))
NO_TPU = through("TPU", 0, trouble="What was asked, found, to do.")


@pytest.mark.parametrize(
    ("settings", "devices", "expected"),
    [
        ({}, LAPTOP, ("supervisor", 1, True)),
        ({}, SERVER, ("supervisor", 4, False)),
        ({"num_processes": 2}, SERVER, ("supervisor", 2, False)),
        ({"num_processes": 3}, LAPTOP, ("supervisor", 3, True)),
        ({"cpu": True}, SERVER, ("supervisor", 1, True)),
        ({"cpu": True, "num_processes": 8}, SERVER, ("supervisor", 8, True)),
        ({"start_method": "fork", "num_processes": 2}, LAPTOP, ("fork", 2, True)),
        ({"start_method": "spawn"}, SERVER, ("spawn", 4, False)),
        ({"engine": "inline"}, ONE_GPU, ("inline", 1, False)),
        ({"engine": "inline", "num_processes": 1}, SERVER, ("inline", 1, False)),
        ({"engine": "local"}, SERVER, ("supervisor", 4, False)),
    ],
)
def test_the_choice_fits_the_request_and_the_machine(settings, devices, expected):
    choice = choose(LaunchingConfig(**settings), devices, can_fork=True)
    assert (choice.start, choice.size, choice.cpu) == expected


@pytest.mark.parametrize(
    ("settings", "devices", "words"),
    [
        ({"num_processes": 5}, SERVER, "num_processes=5 was requested, but this machine has 4 GPUs"),
        ({"num_processes": 2}, ONE_GPU, "has 1 GPU. Use at most 1, or pass cpu=True"),
        ({"engine": "inline", "num_processes": 2}, LAPTOP, "this process is only one"),
        ({"engine": "inline", "timeout": 3.0}, LAPTOP, "nothing can end the function from outside"),
        ({"engine": "inline", "num_cpu_threads_per_process": 2}, LAPTOP, "this process has its threads already"),
        ({"start_method": "fork"}, LAPTOP, "start_method='fork' was requested, but this system can't fork"),
        ({"start_method": "supervisor"}, LAPTOP, "start_method='supervisor' was requested, but this system can't fork"),
        ({"gpu_ids": "0,4"}, HALF, "gpu_ids='0,4' was requested, but .* 4 GPUs, numbered 0 to 3, and no 4"),
        ({"gpu_ids": "5,7"}, HALF, "has 4 GPUs, numbered 0 to 3, and no 5 and no 7. Name others"),
        ({"gpu_ids": "0,2", "num_processes": 3}, HALF, "num_processes=3 was requested, but gpu_ids='0,2' shows 2 GPUs"),
        ({"gpu_ids": "1", "engine": "inline"}, HALF, "this process has its devices already"),
        ({"num_processes": 2}, KAGGLE, "num_processes=2 .* all of this machine's 8 TPU chips only. Use 8 or 1"),
        ({"num_processes": 8}, COLAB, "num_processes=8 .* this machine has 1 TPU chip. Use 1, or pass cpu=True"),
        ({"gpu_ids": "0,1"}, V4, "gpu_ids='0,1' .* TPU chips are not chosen by number"),
        ({"engine": "xla"}, LAPTOP, r"engine='xla' .* not installed. pip install 'accelerate-nb\[tpu\]'"),
        ({"engine": "xla", "cpu": True}, V4, "engine='xla' was requested with cpu=True"),
        ({}, NO_TPU, "^What was asked, found, to do.$"),
        ({"engine": "inline"}, V4, "engine='inline' was requested with num_processes=4"),
    ],
)
def test_what_does_not_fit_reports_what_was_requested_what_there_is_and_what_to_do(settings, devices, words):
    with pytest.raises(LaunchError, match=words):
        choose(LaunchingConfig(**settings), devices, can_fork="can't fork" not in words)


@pytest.mark.parametrize(
    ("settings", "size", "shows"),
    [
        ({"gpu_ids": "0,2,3"}, 3, {"CUDA_VISIBLE_DEVICES": "0,2,3"}),
        ({"gpu_ids": "3"}, 1, {"CUDA_VISIBLE_DEVICES": "3"}),
        ({"gpu_ids": "0,1", "num_processes": 1}, 1, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ({"gpu_ids": "GPU-8f,GPU-9a"}, 2, {"CUDA_VISIBLE_DEVICES": "GPU-8f,GPU-9a"}),
        ({"gpu_ids": "all"}, 2, {}),
        ({"gpu_ids": "9", "cpu": True, "num_processes": 2}, 2, {}),
    ],
)
def test_only_the_accelerators_that_were_named_count_and_are_shown(settings, size, shows):
    choice = choose(LaunchingConfig(**settings), HALF, can_fork=True)
    assert choice.size == size
    assert choice.shows == shows


@pytest.mark.parametrize("settings", [{"gpu_ids": "0,9"}, {"gpu_ids": "GPU-8f"}, {"gpu_ids": "0", "num_processes": 2}])
def test_a_machine_without_accelerators_has_none_to_name(settings):
    words = f"gpu_ids='{settings['gpu_ids']}' was requested, but torch finds no GPU on this machine.*Leave gpu_ids out"
    with pytest.raises(LaunchError, match=words):
        choose(LaunchingConfig(**settings), LAPTOP, can_fork=True)
    assert choose(LaunchingConfig(**settings, cpu=True), LAPTOP, can_fork=True).cpu


@pytest.mark.parametrize(
    ("settings", "devices", "expected"),
    [
        ({}, KAGGLE, (8, {"PJRT_DEVICE": "TPU"})),
        ({"num_processes": 8}, KAGGLE, (8, {"PJRT_DEVICE": "TPU"})),
        ({"num_processes": 1}, KAGGLE, (1, {"PJRT_DEVICE": "TPU"})),
        ({}, V4, (4, {"PJRT_DEVICE": "TPU"})),
        ({}, COLAB, (1, {"PJRT_DEVICE": "TPU"})),
        ({"engine": "local"}, V4, (4, {"PJRT_DEVICE": "TPU"})),
        ({"engine": "inline", "num_processes": 1}, V4, (1, {"PJRT_DEVICE": "TPU"})),
        ({}, XLA_CPU, (2, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})),
        ({"num_processes": 3}, XLA_CPU, (3, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})),
        ({"engine": "xla", "num_processes": 2}, BARE, (2, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})),
        ({"engine": "xla"}, BOTH, (1, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})),
    ],
)
def test_ranks_are_cores_of_a_tpu_where_there_is_one(settings, devices, expected):
    choice = choose(LaunchingConfig(**settings), devices, can_fork=True)
    assert (choice.size, choice.shows) == expected
    assert (choice.kind, choice.cpu) == ("xla", False)
    assert accelerates_word(choice, devices) == "XLA"


@pytest.mark.parametrize("devices", [V4, XLA_CPU, NO_TPU])
def test_the_cpu_that_was_requested_is_torchs_own(devices):
    choice = choose(LaunchingConfig(cpu=True, num_processes=2), devices, can_fork=True)
    assert (choice.kind, choice.cpu, choice.shows) == ("cpu", True, {})


def test_gpus_are_computed_on_where_torch_xla_is_only_installed():
    choice = choose(LaunchingConfig(), BOTH, can_fork=True)
    assert (choice.kind, choice.size, accelerates_word(choice, BOTH)) == ("cuda", 4, "MULTI_GPU")


def test_a_tpu_that_this_process_holds_is_for_nobody_else():
    held = through("TPU", 4, held="torch_xla's runtime is awake in this process (7)")
    words = r"awake in this process \(7\).* Restart the kernel, and launch before any cell"
    for method in ("auto", "spawn", "fork"):
        with pytest.raises(LaunchError, match=words):
            choose(LaunchingConfig(start_method=method), held, can_fork=True)
    assert choose(LaunchingConfig(engine="inline", num_processes=1), held, can_fork=True).start == "inline"
    assert choose(LaunchingConfig(cpu=True), held, can_fork=True).kind == "cpu"


def test_a_runtime_that_is_awake_on_the_cpu_keeps_only_forks_of_this_process_away():
    held = through("CPU", 1, held="torch_xla's runtime is awake in this process (7)")
    assert choose(LaunchingConfig(), held, can_fork=True).start == "supervisor"
    assert choose(LaunchingConfig(start_method="spawn"), held, can_fork=True).start == "spawn"
    with pytest.raises(LaunchError, match=r"start_method='fork' .*awake in this process \(7\).*Leave start_method out"):
        choose(LaunchingConfig(start_method="fork"), held, can_fork=True)


@pytest.mark.parametrize(
    ("settings", "devices", "why"),
    [
        ({}, LAPTOP, "1 process: no GPU found, using the CPU; fresh Pythons: this system can't fork"),
        ({}, SERVER, "4 of 4 GPUs; forked by a supervisor"),
        ({"num_processes": 2}, LAPTOP, "2 processes: no GPU found, using the CPU; forked by a supervisor"),
        ({}, KAGGLE, "8 of 8 TPU chips; forked by a supervisor"),
        ({"num_processes": 1}, KAGGLE, "1 of 8 TPU chips; forked by a supervisor"),
        ({}, XLA_CPU, "2 XLA CPU devices; forked by a supervisor"),
        ({"engine": "xla"}, BARE, "1 XLA CPU device, through torch_xla: there is no TPU; forked by a supervisor"),
    ],
)
def test_the_reason_is_given(settings, devices, why):
    can_fork = "can't fork" not in why
    choice = choose(LaunchingConfig(**settings), devices, can_fork)
    assert (choice.start, choice.why) == ("supervisor" if can_fork else "spawn", why)


# Before a launch takes an accelerator that a detached run holds, it names the run.


@pytest.mark.parametrize(
    ("kind", "shows", "environment", "devices"),
    [
        ("cpu", {}, {}, ()),
        ("cuda", {}, {}, ("cuda:0", "cuda:1")),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("cuda:2", "cuda:3")),
        ("cuda", {}, {"CUDA_VISIBLE_DEVICES": "5,6,7"}, ("cuda:5", "cuda:6")),
        ("mps", {}, {}, ("mps:0", "mps:1")),
    ],
)
def test_the_devices_of_a_placement_are_named_as_the_machine_counts_them(kind, shows, environment, devices):
    assert devices_of(Placement("supervisor", 2, kind == "cpu", "", shows, kind=kind), environment) == devices


def keep(parent, name, **facts):
    folder = new_folder(parent, name)
    with closing(RunRecorder(folder)) as record:
        status = {"name": name, "state": "running", "started": 1.0, "ranks": 2, "detached": True, "devices": ["cuda:1"]}
        record.status(**{**status, **facts})
    return folder


def test_a_run_that_holds_a_device_is_named_and_one_that_is_over_or_elsewhere_is_not(tmp_path):
    held = keep(tmp_path, "holds")
    hold_lock(held)
    keep(tmp_path, "over", state="finished")
    keep(tmp_path, "lost")
    other = keep(tmp_path, "other_devices", devices=["cuda:7"])
    hold_lock(other)
    [text] = taken(["cuda:0", "cuda:1"], tmp_path)
    assert "cuda:1 is taken by the detached run 'holds'" in text
    assert str(held) in text
    assert list(taken(["cuda:0"], tmp_path)) == []
