"""Hidden states come back as they went in, from memory and from disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfbyte.calibration.activations import ActivationStore, DiskStore, MemoryStore
from halfbyte.errors import HalfbyteError


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationStore]:
    store = MemoryStore() if request.param == "memory" else DiskStore(tmp_path)
    yield store
    store.close()


def states(length: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, length, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_samples_of_several_lengths_come_back(store: ActivationStore, dtype: torch.dtype) -> None:
    samples = [states(length, dtype, length) for length in (5, 1, 9)]
    for sample in samples:
        store.append(sample)
    assert len(store) == 3
    samples[1] = states(1, dtype, 77)
    store.replace(1, samples[1])
    for index in (2, 0, 1):
        assert store.read(index).dtype == dtype
        assert torch.equal(store.read(index), samples[index])


def test_a_strided_sample_comes_back(store: ActivationStore) -> None:
    sample = states(6, torch.float32).transpose(1, 2)
    store.append(sample)
    assert torch.equal(store.read(0), sample)


def test_what_is_done_to_a_tensor_later_does_not_reach_the_store(store: ActivationStore) -> None:
    sample = states(4, torch.float32)
    kept = sample.clone()
    store.append(sample)
    sample.zero_()
    store.read(0).zero_()
    assert torch.equal(store.read(0), kept)


def test_special_values_keep_their_bits(store: ActivationStore) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(1, -1, 64)
    store.append(bits.view(torch.bfloat16))
    assert torch.equal(store.read(0).view(torch.int16), bits)


def test_another_shape_or_dtype_cannot_replace_a_sample(store: ActivationStore) -> None:
    store.append(states(4, torch.float32))
    with pytest.raises(HalfbyteError, match=r"sample 0 is \[1, 4, 6\] torch\.float32"):
        store.replace(0, states(5, torch.float32))
    with pytest.raises(HalfbyteError, match=r"\[1, 4, 6\] torch\.bfloat16 cannot replace it"):
        store.replace(0, states(4, torch.bfloat16))


def test_the_file_has_no_name_from_the_start(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.append(states(4, torch.float32))
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [views[0][:7]], offset))
    monkeypatch.setattr(os, "pwrite", lambda file, view, offset: pwrite(file, view[:5], offset))
    store, samples = DiskStore(tmp_path), [states(3, torch.float32), states(2, torch.float32, 1)]
    for sample in samples:
        store.append(sample)
    assert all(torch.equal(store.read(index), sample) for index, sample in enumerate(samples))


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = DiskStore(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(HalfbyteError, match=r"cannot be written \(No space left"):
        store.append(states(3, torch.float32))
    assert len(store) == 0


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match="nowhere: cannot keep activations there"):
        DiskStore(tmp_path / "nowhere")
