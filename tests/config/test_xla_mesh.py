"""How the mesh of one process's devices is said, and what becomes of it on a machine."""

from __future__ import annotations

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.config.xla_mesh import sizes
from accelerate_nb.errors import ConfigurationError


@pytest.mark.parametrize(
    ("mesh", "kept"),
    [
        ("fsdp", "fsdp"),
        ("fsdp=-1", "fsdp"),
        ("Data = 2, FSDP=4", "data=2,fsdp=4"),
        ("data=2,fsdp", "data=2,fsdp"),
        ("tensor=2,fsdp=2", "tensor=2,fsdp=2"),
    ],
)
def test_a_mesh_is_kept_in_one_spelling(mesh, kept):
    assert resolve({"xla_mesh": mesh}, {}).training.xla_mesh == kept
    assert resolve({}, {"ACCELERATE_NB_XLA_MESH": mesh}).training.xla_mesh == kept
    assert resolve({}, {"ACCELERATE_NB_XLA_MESH": kept}).training.environ()["ACCELERATE_NB_XLA_MESH"] == kept


@pytest.mark.parametrize(
    ("mesh", "wrong"),
    [
        ("fspd", r"There is no axis 'fspd'. Did you mean fsdp\? The axes are data, fsdp, tensor."),
        ("model=2", "There is no axis 'model'. The axes are"),
        ("", "There is no axis ''"),
        ("data,fsdp", "Only one axis can be without a size"),
        ("fsdp=2,fsdp=2", "'fsdp' is there twice"),
        ("fsdp=two", "'two' is not a whole number"),
        ("fsdp=0", "0 is neither a number of devices nor -1"),
        (4, "should be axes of a mesh with their sizes"),
    ],
)
def test_what_is_no_mesh_is_refused_with_what_is_wrong(mesh, wrong):
    with pytest.raises(ConfigurationError, match=wrong) as error:
        resolve({"xla_mesh": mesh}, {})
    assert "Pass such a value, or leave it out." in str(error.value)


@pytest.mark.parametrize(
    ("mesh", "devices", "found"),
    [
        ("fsdp", 8, {"fsdp": 8}),
        ("data=2,fsdp", 8, {"data": 2, "fsdp": 4}),
        ("fsdp,data=2", 8, {"fsdp": 4, "data": 2}),
        ("data=2,fsdp=2,tensor=2", 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        ("data", 1, {"data": 1}),
    ],
)
def test_a_size_that_was_left_out_is_what_the_others_leave(mesh, devices, found):
    assert sizes(mesh, devices) == found
    assert list(sizes(mesh, devices)) == list(found)


@pytest.mark.parametrize(
    ("mesh", "devices", "wrong"),
    [
        ("fsdp=8", 4, "needs 8 devices, but there are 4. Choose sizes whose product is 4"),
        ("data=3,fsdp", 8, "needs a multiple of 3 devices, but there are 8"),
        ("data=8,fsdp", 4, "needs a multiple of 8 devices, but there are 4"),
        ("fdsp", 4, "Did you mean fsdp"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_reports_how_many_there_are(mesh, devices, wrong):
    with pytest.raises(ConfigurationError, match=wrong):
        sizes(mesh, devices)
