from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from halfbyte.checkpoint.dtypes import TORCH_DTYPES
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import WeightSource
from tests.checkpoint.files import write_checkpoint, write_raw


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    tensors = {
        "bf16": torch.randn(6, 5).bfloat16(),
        "f32": torch.randn(3, 4),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "i64": torch.tensor([7, -7]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "experts": torch.randn(3, 6, 4).half(),
    }
    return Checkpoint.open(write_checkpoint(tmp_path, {"model.safetensors": tensors})), tensors


def test_loads_what_was_saved(saved: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, tensors = saved
    assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        loaded = checkpoint.load(name)
        assert loaded.dtype is tensor.dtype
        assert loaded.shape == tensor.shape
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_rows_are_slices(saved: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, tensors = saved
    assert torch.equal(checkpoint.load_rows("bf16", 2, 5), tensors["bf16"][2:5])
    assert torch.equal(checkpoint.load_rows("experts", 1, 2), tensors["experts"][1:2])
    assert checkpoint.load_rows("bf16", 3, 3).shape == (0, 5)
    for start, stop in ((0, 7), (-1, 2), (4, 3)):
        with pytest.raises(HalfbyteError, match=r"'bf16' of shape \[6, 5\] has no rows"):
            checkpoint.load_rows("bf16", start, stop)
    with pytest.raises(HalfbyteError, match="'scalar'"):
        checkpoint.load_rows("scalar", 0, 1)


def test_sources_point_into_tensors(saved: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, tensors = saved
    matrix, experts = tensors["bf16"], tensors["experts"]
    expected = {
        WeightSource("bf16"): matrix,
        WeightSource("bf16", rows=(1, 6, 2)): matrix[1:6:2],
        WeightSource("bf16", transposed=True): matrix.t(),
        WeightSource("bf16", rows=(0, 5, 3), transposed=True): matrix.t()[0:5:3],
        WeightSource("experts", expert=2): experts[2],
        WeightSource("experts", expert=1, rows=(3, 6, 1)): experts[1][3:6],
        WeightSource("experts", expert=1, rows=(1, 4, 2), transposed=True): experts[1].t()[1:4:2],
    }
    for source, weight in expected.items():
        loaded = checkpoint.load_source(source)
        assert torch.equal(loaded, weight), source
        assert loaded.is_contiguous()


def test_bytes_are_copied_to_files_and_streams(
    saved: tuple[Checkpoint, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    checkpoint, tensors = saved
    for name, tensor in tensors.items():
        expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        stream = io.BytesIO()
        checkpoint.copy_bytes(name, stream)
        assert stream.getvalue() == expected
        with (tmp_path / "copy").open("wb") as buffered:
            buffered.write(b"before")
            checkpoint.copy_bytes(name, buffered)
            buffered.write(b"after")
        assert (tmp_path / "copy").read_bytes() == b"before" + expected + b"after"


def test_numpy_needs_no_torch(saved: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, tensors = saved
    assert np.array_equal(checkpoint.numpy("bf16"), tensors["bf16"].float().numpy())
    assert checkpoint.numpy("bf16").dtype == np.float32
    assert np.array_equal(checkpoint.numpy("experts"), tensors["experts"].numpy())
    assert np.array_equal(checkpoint.numpy("i64"), [7, -7])
    assert np.array_equal(checkpoint.numpy("fp8"), tensors["fp8"].view(torch.uint8).numpy())
    assert checkpoint.numpy("scalar") == 2.5
    program = (
        "import sys; from halfbyte.checkpoint.reader import Checkpoint\n"
        f"assert Checkpoint.open({str(checkpoint.path)!r}).numpy('bf16').shape == (6, 5)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_names_and_dtypes(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {})
    header = {"six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    write_raw(path / "model.safetensors", header, b"abc")
    checkpoint = Checkpoint.open(path)
    with pytest.raises(HalfbyteError, match="no tensor 'seven'"):
        checkpoint.load("seven")
    with pytest.raises(HalfbyteError, match="'six' has dtype F6_E2M3, which torch cannot hold"):
        checkpoint.load("six")
    stream = io.BytesIO()
    checkpoint.copy_bytes("six", stream)
    assert stream.getvalue() == b"abc"


def test_a_file_that_shrinks_after_opening(saved: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, _ = saved
    file = checkpoint.path / "model.safetensors"
    last = list(checkpoint.tensors)[-1]
    file.write_bytes(file.read_bytes()[:-1])
    for read in (checkpoint.load, checkpoint.numpy, lambda name: checkpoint.copy_bytes(name, io.BytesIO())):
        with pytest.raises(HalfbyteError, match=f"ended inside tensor '{last}'"):
            read(last)
    file.unlink()
    with pytest.raises(HalfbyteError, match="cannot be read"):
        checkpoint.load(last)


def test_resident_memory_stays_at_one_tensor(tmp_path: Path) -> None:
    """Forty tensors of 8 MB are read one by one; mapping the file would leave all of them resident."""
    write_checkpoint(tmp_path, {"model.safetensors": {f"t{n}": torch.zeros(2 << 20) for n in range(40)}})
    program = (
        "import resource, sys, torch; from halfbyte.checkpoint.reader import Checkpoint\n"
        "checkpoint = Checkpoint.open(sys.argv[1]); checkpoint.load('t0')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for name in checkpoint.tensors: checkpoint.load(name)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    grown = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True)
    assert int(grown.stdout) < 40_000  # kilobytes; all tensors together are 320,000


def test_every_torch_dtype_is_stored_under_one_name() -> None:
    assert len(set(TORCH_DTYPES.values())) == len(TORCH_DTYPES)
