"""What torch_xla would compute on is found without waking it, and what keeps it from that is said."""

import re
import sys

import pytest

from accelerate_nb.devices import xla
from accelerate_nb.devices.gpus import DeviceType
from accelerate_nb.devices.probe import probe
from accelerate_nb.devices.xla import XlaInstallation, detect_devices, for_others, for_workers, holder_in_process
from tests.processes import python

NONE, NO_LIBTPU = XlaInstallation(), XlaInstallation("2.9.0", "2.9.1", libtpu=False)
FITS, NEWER = (XlaInstallation("2.9.0", torch, libtpu=True) for torch in ("2.9.1+cpu", "2.13.0+cu130"))
V3, V4, V5E, V6E = "0x0027", "0x005e", "0x0063", "0x006f"
# As these services set their machines up.
COLAB = {
    "COLAB_TPU_1VM": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
KAGGLE = {
    "PJRT_DEVICE": "TPU",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_PROCESS_ADDRESSES": "local",
    "CLOUD_TPU_TASK_ID": "0",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,4,1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@pytest.fixture
def bus(tmp_path):
    """A PCI bus with chips on it, among other cards: the only mock of a TPU that its finding needs."""

    def with_chips(device="", count=0):
        cards = [("0x8086", "0x7190"), ("0x1ae0", "0x0042"), *[("0x1ae0", device)] * count]
        for number, (vendor, model) in enumerate(cards):
            folder = tmp_path / f"0000:00:{number:02x}.0"
            folder.mkdir()
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "device").write_text(f"{model}\n")
        (tmp_path / "0000:00:ff.0").mkdir()
        return tmp_path

    return with_chips


@pytest.mark.parametrize(
    ("device", "chips", "environment", "cores"),
    [
        (V4, 4, {"TPU_NUM_DEVICES": "1"}, 1),
        (V4, 4, {"TPU_NAME": "local"}, 4),
        (V4, 4, {"TPU_VISIBLE_CHIPS": "2"}, 1),
        (V4, 4, {"TPU_VISIBLE_CHIPS": "0,1,2,3"}, 4),
        (V5E, 8, KAGGLE, 8),
        (V5E, 1, COLAB, 1),
        (V6E, 1, {**COLAB, "TPU_ACCELERATOR_TYPE": "v6e-1"}, 1),
        (V5E, 8, {"PJRT_DEVICE": "TPU_C_API"}, 8),
    ],
)
def test_the_chips_of_a_tpu_are_counted_on_the_bus(bus, device, chips, environment, cores):
    found = detect_devices(environment, bus(device, chips), FITS)
    assert (found.device, found.count) == ("TPU", cores)
    assert (found.requested, found.trouble, found.label) == (True, "", "TPU chip")


def test_a_tpu_v2_or_v3_is_refused_with_what_to_take_in_its_place(bus):
    found = detect_devices({"TPU_ACCELERATOR_TYPE": "v3-8"}, bus(V3, 4), FITS)
    assert (found.device, found.count) == ("TPU", 0)
    instead = "TPU v5e or v6e, as Colab and Kaggle offer them"
    for words in ("TPU v2 or v3", instead, "cpu=True", "Hugging Face's Accelerate"):
        assert words in found.trouble


@pytest.mark.parametrize(
    ("environment", "count", "requested"),
    [
        ({"PJRT_DEVICE": "CPU"}, 1, True),
        ({"PJRT_DEVICE": "cpu", "CPU_NUM_DEVICES": "3", "TPU_NAME": "mine"}, 3, True),
        ({"CPU_NUM_DEVICES": "2"}, 2, False),
        ({"COLAB_TPU_1VM": ""}, 1, False),
    ],
)
def test_the_cpu_is_what_torch_xla_computes_on_where_there_is_no_tpu(bus, environment, count, requested):
    found = detect_devices(environment, bus(), FITS)
    assert (found.device, found.count, found.requested) == ("CPU", count, requested)
    assert found.trouble == ""


def test_a_machine_with_chips_computes_on_its_cpu_where_that_is_set(bus):
    assert detect_devices({"PJRT_DEVICE": "CPU", "TPU_NAME": ""}, bus(V4, 4), FITS).device == "CPU"


@pytest.mark.parametrize("device", ["", "CPU", "CUDA"])
def test_without_torch_xla_nothing_is_found_where_nothing_requests_a_tpu(bus, device):
    assert detect_devices({"PJRT_DEVICE": device}, bus(V4, 4), XlaInstallation()) is None


@pytest.mark.parametrize(
    ("environment", "chips", "installed", "message"),
    [
        (
            {"TPU_NAME": "mine"},
            0,
            NONE,
            r"TPU_NAME=mine requests .* not installed\. pip install 'accelerate-nb\[tpu\]'",
        ),
        (KAGGLE, 8, NONE, r"PJRT_DEVICE=TPU requests .*accelerate-nb\[tpu\]"),
        ({"PJRT_DEVICE": "TPU"}, 0, FITS, r"PJRT_DEVICE=TPU requests a TPU, but there is no TPU chip .*cpu=True"),
        ({"PJRT_DEVICE": "CUDA"}, 4, FITS, r"PJRT_DEVICE=CUDA requests .* GPUs are used without torch_xla"),
        ({"PJRT_DEVICE": "NEURON"}, 0, FITS, r"NEURON"),
        ({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "two"}, 0, FITS, r"CPU_NUM_DEVICES='two' .* no number"),
        ({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "0"}, 0, FITS, r"CPU_NUM_DEVICES='0'"),
        ({"TPU_NUM_DEVICES": "-1"}, 4, FITS, r"TPU_NUM_DEVICES='-1' .* no number"),
        ({}, 4, NEWER, r"2\.9\.0 loads beside torch 2\.9 only, and torch 2\.13\.0"),
        ({"PJRT_DEVICE": "CPU"}, 0, NEWER, r"pip install 'torch==2\.9\.\*'"),
        ({}, 4, NO_LIBTPU, r"libtpu.* not installed\. pip install 'torch_xla\[tpu\]'"),
        ({"TPU_VISIBLE_CHIPS": "0,1"}, 4, FITS, r"TPU_VISIBLE_CHIPS=0,1 shows some of this machine's 4 TPU chips"),
    ],
)
def test_what_keeps_torch_xla_from_its_devices_is_reported_with_what_to_do(bus, environment, chips, installed, message):
    found = detect_devices(environment, bus(V4, chips), installed)
    assert found.count == 0
    assert found.requested
    assert re.search(message, found.trouble)


@pytest.mark.parametrize("version", ["2.9.0+libtpu", "2.9.0.dev20251001", "unknown"])
def test_versions_of_one_numbering_fit_whatever_they_were_built_for(bus, version):
    assert detect_devices({}, bus(V4, 1), XlaInstallation(version, "2.9.1+cpu", libtpu=True)).trouble == ""


def test_what_a_notebook_service_sets_for_one_process_is_kept_from_several():
    environment = for_workers({**KAGGLE, "HOME": "/root", "PJRT_LOCAL_PROCESS_RANK": "0", "XLA_USE_SPMD": "1"})
    assert environment == {
        "PJRT_DEVICE": "TPU",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "HOME": "/root",
        # what torch_xla asks for the whole machine's topology
        "TPU_WORKER_ID": "0",
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    }
    assert for_workers(COLAB) == COLAB


def test_one_chip_that_was_chosen_stays_chosen_and_all_of_them_are_shared_out():
    assert for_workers({"TPU_VISIBLE_CHIPS": "2"}) == {"TPU_VISIBLE_CHIPS": "2"}
    assert for_workers({"TPU_VISIBLE_CHIPS": "0,1,2,3"}) == {}


def test_a_machine_that_is_one_of_several_keeps_what_it_receives_of_them():
    pod = {"TPU_WORKER_HOSTNAMES": "a,b", "CLOUD_TPU_TASK_ID": "1", "TPU_PROCESS_ADDRESSES": "a:8471,b:8471"}
    assert for_workers({**pod, "XLA_USE_SPMD": "1"}) == pod


def test_a_process_that_has_a_chips_file_open_holds_the_chip_and_none_while_torch_xla_sleeps(tmp_path):
    assert holder_in_process("TPU") == ""
    assert holder_in_process("CPU") == ""
    for pid, target in [(11, "/dev/accel0"), (12, "/dev/vfio/3"), (13, "/dev/vfio/vfio"), (14, "/dev/null")]:
        folder = tmp_path / str(pid) / "fd"
        folder.mkdir(parents=True)
        (folder / "7").symlink_to(target)
    (tmp_path / "15").mkdir()
    assert xla.holders(tmp_path) == [11, 12]


def test_the_probe_reports_what_torch_xla_would_compute_on_and_imports_none_of_it():
    code = (
        "import sys; from accelerate_nb.devices.probe import probe; "
        "print(probe().xla is None, [name for name in ('torch', 'torch_xla', '_XLAC') if name in sys.modules])"
    )
    assert python("-c", code, check=True, PJRT_DEVICE="").stdout == f"{not xla.is_installed()} []\n"


def test_a_machine_on_which_nothing_requests_torch_xla_computes_as_before(monkeypatch):
    kind = probe({}).kind
    monkeypatch.setattr(xla, "installation", lambda: FITS)
    assert probe({}).kind == kind
    assert probe({}).xla.device == "CPU"
    assert probe({"PJRT_DEVICE": "CPU"}).kind == "xla"


def test_gpus_are_computed_on_where_some_library_has_loaded_torch_xla(monkeypatch):
    monkeypatch.setattr("accelerate_nb.devices.probe.DEVICE_TYPES", (DeviceType("cuda", "GPU", lambda _: 4),))
    monkeypatch.setattr(xla, "installation", lambda: FITS)
    # another test of this process may have loaded it
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    assert probe({"PJRT_DEVICE": "CPU"}).kind == "xla"
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    assert probe({"PJRT_DEVICE": "CPU"}).kind == "cuda"


def test_workers_on_gpus_receive_no_device_of_torch_xla(monkeypatch):
    environment = {"PJRT_DEVICE": "CPU", "HOME": "/root"}
    monkeypatch.setattr(xla, "is_installed", lambda: False)
    assert for_others(environment) == {"HOME": "/root"}
    monkeypatch.setattr(xla, "is_installed", lambda: True)
    assert for_others(environment) == {"HOME": "/root", "PJRT_SELECT_DEFAULT_DEVICE": "0"}
