"""What goes to the disk by blocks is what was given, and its sum is that of the file."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate_nb.runtime.checkpoints.manifest import entry_of
from accelerate_nb.runtime.checkpoints.writer import BLOCK, DirectWriter, DiskFile, FileToWrite, write_files

SIZES = (1, 8, 4095, 4096, (1 << 20) + 3, BLOCK, BLOCK + 5, 2 * BLOCK - 1)


def test_a_file_of_any_length_is_written_as_given(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        for size in SIZES:
            content = random.Random(size).randbytes(size)
            file = DiskFile(tmp_path / "file", size, DirectWriter(3, pool))
            file.write(content[: size // 3])
            file.write(memoryview(content)[size // 3 :])
            entry = file.finish()
            assert (tmp_path / "file").read_bytes() == content
            assert entry_of(tmp_path / "file") == entry
            assert entry.bytes == size
        # a full disk is reported at the end
        file = DiskFile(Path("/dev/full"), 0, DirectWriter(1, pool))
        file.write(bytes(2 * BLOCK))
        with pytest.raises(OSError, match="No space left on device"):
            file.finish()


def test_safetensors_of_every_kind_are_read_by_their_library(tmp_path: Path) -> None:
    floats = torch.float64, torch.float32, torch.float16, torch.bfloat16
    dtypes: Any = (*floats, torch.int64, torch.int8, torch.bool)
    tensors = {f"{dtype}": torch.arange(15).reshape(3, 5).to(dtype) for dtype in dtypes}
    tensors |= {"one": torch.tensor(2.5), "none": torch.zeros(0, 3), "turned": torch.randn(4, 6).t()}
    tensors |= {"complex": torch.randn(3, dtype=torch.complex64), "large": torch.randn(1200, 1000)}
    written = write_files([FileToWrite("model.safetensors", tensors, safe=True)], tmp_path, threads=2)
    assert written == {"model.safetensors": entry_of(tmp_path / "model.safetensors")}
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), tensors, rtol=0, atol=0)


def test_what_torch_writes_by_blocks_is_what_it_reads(tmp_path: Path) -> None:
    state = {"state": {0: {"step": torch.tensor(3.0), "moment": torch.randn(2_500_000)}}, "groups": [{"lr": 0.1}]}
    write_files([FileToWrite("optimizer.bin", state)], tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "optimizer.bin", weights_only=True), state, rtol=0, atol=0)
