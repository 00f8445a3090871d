from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from halfbyte.checkpoint.headers import DTYPE_BITS, read_header
from halfbyte.errors import HalfbyteError
from tests.checkpoint.files import write_raw


def entry(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_names_what_lies_where(tmp_path: Path) -> None:
    saved = {"b": torch.arange(6, dtype=torch.int32).reshape(2, 3), "a": torch.ones(5, dtype=torch.bfloat16)}
    save_file(saved, tmp_path / "x.safetensors", metadata={"format": "pt"})
    tensors, metadata = read_header(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt"}
    assert {name: (info.dtype, info.shape, info.nbytes) for name, info in tensors.items()} == {
        "b": ("I32", (2, 3), 24),
        "a": ("BF16", (5,), 10),
    }
    raw = (tmp_path / "x.safetensors").read_bytes()
    for name, tensor in saved.items():
        info = tensors[name]
        assert raw[info.offset : info.offset + info.nbytes] == tensor.view(torch.uint8).numpy().tobytes()
    assert [info.offset for info in tensors.values()] == sorted(info.offset for info in tensors.values())


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_of_the_format(tmp_path: Path, dtype: str) -> None:
    size = 8 * DTYPE_BITS[dtype] // 8
    file = write_raw(tmp_path / "x", {"t": entry(dtype, [8], [0, size])}, bytes(size))
    assert read_header(file)[0]["t"].nbytes == size
    with safe_open(file, "np") as reference:
        assert reference.get_slice("t").get_dtype() == dtype


FAULTS = {
    "empty file": (b"", "not a safetensors file"),
    "truncated header": ((1000).to_bytes(8, "little") + b"{}", "truncated"),
    "absurd header length": ((1 << 62).to_bytes(8, "little") + b"{}", "header length 4611686018427387904"),
}


@pytest.mark.parametrize(("content", "message"), FAULTS.values(), ids=FAULTS)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(HalfbyteError, match=message):
        read_header(file)


HEADERS: dict[str, tuple[object, bytes, str]] = {
    "data cut off": ({"t": entry()}, b"abc", "truncated, the tensors end at byte"),
    "data left over": ({"t": entry()}, b"abcde", "longer than its header says"),
    "overlap": ({"a": entry(), "b": entry(shape=[4], offsets=[2, 6])}, bytes(6), "'b' overlaps"),
    "hole": ({"a": entry(), "b": entry(shape=[4], offsets=[6, 10])}, bytes(10), "'b' leaves a hole"),
    "hole at the start": ({"a": entry(offsets=[4, 8])}, bytes(8), "'a' leaves a hole"),
    "wrong shape": ({"t": entry(shape=[5])}, bytes(4), "'t' of dtype U8 and shape .5. does not fit"),
    "wrong dtype": ({"t": entry("I16")}, bytes(4), "'t' of dtype I16 and shape .4. does not fit"),
    "unknown dtype": ({"t": entry("Q4")}, bytes(4), "dtype 'Q4' of tensor 't' is not known"),
    "bits that fill no byte": ({"t": entry("F4", [3], [0, 1])}, b"a", "'t' of dtype F4"),
    "negative size": ({"t": entry(shape=[-4])}, bytes(4), "non-negative integers"),
    "size that is no number": ({"t": entry(shape=["4"])}, bytes(4), "non-negative integers"),
    "size that is a truth": ({"t": entry(shape=[True], offsets=[0, 1])}, b"a", "non-negative integers"),
    "reversed range": ({"t": entry(offsets=[4, 0])}, bytes(4), "does not fit its byte range"),
    "three offsets": ({"t": entry(offsets=[0, 4, 8])}, bytes(4), "two data_offsets"),
    "no shape": ({"t": {"dtype": "U8", "data_offsets": [0, 4]}}, bytes(4), "needs dtype, shape"),
    "entry that is no object": ({"t": [1, 2]}, b"", "needs dtype, shape"),
    "header that is a list": ([1], b"", "expected a JSON object, found list"),
    "header that is no JSON": (b"{nonsense", b"", "not readable as JSON"),
    "header that is no UTF-8": (b'{"\xff": 1}', b"", "not readable as JSON"),
    "half a character": (
        b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b"",
        "not readable",
    ),
    "endless nesting": (b'{"a":' + b"[" * 100_000, b"", "not readable as JSON"),
    "a tensor twice": (
        b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"a",
        "'t' occurs twice",
    ),
    "a field twice": (
        b'{"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b"a",
        "'dtype' occurs twice",
    ),
    "metadata of numbers": ({"__metadata__": {"n": 1}}, b"", "__metadata__"),
}


@pytest.mark.parametrize(("header", "data", "message"), HEADERS.values(), ids=HEADERS)
def test_what_the_format_forbids(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    file = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(HalfbyteError, match=message) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    header = {
        "none": entry("F32", [0, 3], [0, 0]),
        "one": entry("F32", [], [0, 4]),
        "end": entry("U8", [0], [4, 4]),
    }
    tensors, _ = read_header(write_raw(tmp_path / "x", header, bytes(4)))
    assert {name: info.nbytes for name, info in tensors.items()} == {"none": 0, "one": 4, "end": 0}


small = st.integers(-2, 9)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F32", "I64", "F4", "nonsense"]),
        "shape": st.lists(small | st.just(1 << 70), max_size=3),
        "data_offsets": st.tuples(small, small),
    }
)
headers = st.dictionaries(st.text(max_size=2), entries | st.none() | st.integers(), max_size=3)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    header=headers | st.binary(max_size=40),
    data=st.binary(max_size=12),
    length=st.none() | st.integers(0, 99),
)
def test_refuses_what_the_reference_refuses(
    tmp_path: Path, header: object, data: bytes, length: int | None
) -> None:
    file = write_raw(tmp_path / "x.safetensors", header, data, length)
    try:
        ours = set(read_header(file)[0])
    except HalfbyteError:
        ours = None
    try:
        with safe_open(file, "np") as reference:
            theirs = set(reference.keys())
    except SafetensorError:
        theirs = None
    assert ours is None or ours == theirs, json.dumps(str(header))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(where=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 250))
def test_damage_never_escapes_as_another_error(tmp_path: Path, where: int, byte: int, cut: int) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(7, dtype=torch.int8)}, file)
    damaged = bytearray(file.read_bytes())
    damaged[where % len(damaged)] = byte
    file.write_bytes(damaged[: cut if cut > where else None])
    try:
        tensors, _ = read_header(file)
    except HalfbyteError:
        return
    assert sum(info.nbytes for info in tensors.values()) == 55
