from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.checkpoint.dtypes import STORED_NAMES
from halfbyte.checkpoint.quantization_config import quantization_config
from halfbyte.checkpoint.quantized_weight import decode, encode, stored_entries
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role, WeightSource
from halfbyte.schemes import PRESETS, Scheme
from tests.checkpoint import oracle

M = "model.layers.0.mlp.up_proj"
SPEAKABLE = [name for name in PRESETS if name != "w4a8-int8"]


def layout(rows: int, columns: int) -> ModelLayout:
    module = ModuleInfo(M, Role.LINEAR, rows, columns, WeightSource(f"{M}.weight"))
    return ModelLayout("llama", [module], tied=True, known=True)


def quantized(scheme: Scheme, rows: int = 20, columns: int = 256, dtype: str = "bf16") -> QuantizedTensor:
    torch.manual_seed(0)
    return quantize(torch.randn(rows, columns) + 0.1, scheme.weights.with_scale(dtype))


def group_of(scheme: Scheme, rows: int, columns: int) -> oracle.QuantizationScheme:
    return oracle.only_group(quantization_config({M: scheme}, layout(rows, columns)))


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    pairs = [(a.codes, b.codes), (a.scales, b.scales), (a.zero_points, b.zero_points)]
    return a.format == b.format and all(
        (x is None) == (y is None)
        and (x is None or (x.dtype is y.dtype and torch.equal(x.float(), y.float())))
        for x, y in pairs
    )


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_read_back(name: str, dtype: str) -> None:
    scheme = PRESETS[name]
    q = quantized(scheme, dtype=dtype)
    stored = encode(M, scheme, q, dtype)
    entries = stored_entries(M, scheme, (20, 256), dtype)
    assert [(e.name, e.dtype, e.shape) for e in entries] == [
        (name, STORED_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in stored.items()
    ]
    back = decode(M, scheme, stored)
    assert same(back, q)
    torch.testing.assert_close(dequantize(back), dequantize(q), rtol=2**-22, atol=0)


@pytest.mark.parametrize("name", SPEAKABLE)
def test_compressed_tensors_sees_our_weight(name: str) -> None:
    """Same numbers, rounded to whatever dtype the library computes in."""
    scheme = PRESETS[name]
    q = quantized(scheme, 256, 256)
    theirs = oracle.decompress(M, encode(M, scheme, q, "bf16"), group_of(scheme, 256, 256))
    torch.testing.assert_close(theirs, dequantize(q).to(theirs.dtype), rtol=2**-22, atol=0)


@pytest.mark.parametrize("name", SPEAKABLE)
def test_what_compressed_tensors_writes_is_read(name: str) -> None:
    """Given our scales, the library stores tensors from which we read the weight that the library reads."""
    scheme = PRESETS[name]
    torch.manual_seed(1)
    weight = torch.randn(256, 256)
    q = quantize(weight, scheme.weights.with_scale("f32"))
    parameters = {"weight_scale": q.scales.float()}
    if scheme.weights.scale == "e8m0":
        parameters["weight_scale"] = torch.exp2(q.scales.float() - 127)
    if scheme.weights.granularity == "tensor":
        parameters["weight_scale"] = q.scales.reshape(1)
    if q.outer_scales is not None:
        parameters["weight_global_scale"] = q.outer_scales.reciprocal().reshape(1)
    if q.zero_points is not None:
        parameters["weight_zero_point"] = q.zero_points
    group = group_of(scheme, 256, 256)
    stored = oracle.compress(M, weight, group, **parameters)
    theirs = oracle.decompress(M, stored, group)
    torch.testing.assert_close(dequantize(decode(M, scheme, stored)), theirs.float(), rtol=2**-7, atol=1e-30)
    assert (decode(M, scheme, stored).codes.float() != q.codes.float()).float().mean() < 0.01


@pytest.mark.parametrize("rows", [1, 7, 8, 20])
def test_packed_zero_points_of_any_number_of_rows(rows: int) -> None:
    """Zero points are packed along the rows, eight to a word, also where eight does not divide them."""
    scheme = PRESETS["w4a16-asym"]
    q = quantized(scheme, rows)
    stored = encode(M, scheme, q, "bf16")
    assert stored[f"{M}.weight_zero_point"].shape == (-(-rows // 8), 2)
    assert same(decode(M, scheme, stored), q)
    theirs = oracle.decompress(M, stored, group_of(scheme, rows, 256))
    assert torch.equal(theirs, dequantize(q).to(theirs.dtype))


@settings(deadline=None)
@given(st.lists(st.integers(-8, 7), min_size=16, max_size=16), st.integers(-8, 7))
def test_packed_bytes_by_definition(codes: list[int], zero: int) -> None:
    """Word j of a row holds code 8j+i plus 8 in its nibble i; zero points do the same along rows."""
    fmt = TensorFormat("int4", "group", 16, symmetric=False, scale="bf16")
    scheme = Scheme("x", fmt)
    q = QuantizedTensor(
        fmt,
        torch.tensor([codes], dtype=torch.int8),
        torch.ones(1, 1, dtype=torch.bfloat16),
        torch.tensor([[zero]], dtype=torch.int8),
    )
    stored = encode(M, scheme, q, "bf16")
    words = [sum((code + 8) << 4 * i for i, code in enumerate(codes[start : start + 8])) for start in (0, 8)]
    assert [word & 0xFFFFFFFF for word in stored[f"{M}.weight_packed"].flatten().tolist()] == words
    assert stored[f"{M}.weight_zero_point"].tolist() == [[zero + 8]]
    assert stored[f"{M}.weight_shape"].tolist() == [1, 16]


def test_the_global_scale_of_nvfp4_divides() -> None:
    scheme = PRESETS["nvfp4"]
    q = quantized(scheme)
    assert q.outer_scales is not None
    stored = encode(M, scheme, q, "bf16")[f"{M}.weight_global_scale"]
    torch.testing.assert_close(stored, 1 / q.outer_scales.reshape(1), rtol=2**-23, atol=0)


def test_ragged_blocks() -> None:
    scheme = PRESETS["fp8_per_block"]
    q = quantized(scheme, 200, 300)
    stored = encode(M, scheme, q, "bf16")
    assert stored[f"{M}.weight_scale"].shape == (2, 3)
    assert same(decode(M, scheme, stored), q)


def test_two_level_weights_by_definition() -> None:
    """w = (u - z) * s * c with u, z from packed words, s int8 and c fp32."""
    scheme = PRESETS["w4a8-int8"]
    q = quantized(scheme)
    stored = encode(M, scheme, q, "bf16")
    shifts = 4 * torch.arange(8)
    u = (stored[f"{M}.weight_packed"][..., None] >> shifts & 15).reshape(20, 256)
    z = (stored[f"{M}.weight_zero_point"][:, None] >> shifts[:, None] & 15).reshape(24, 2)[:20]
    s = stored[f"{M}.weight_scale"].to(torch.int32)
    level_one = ((u.reshape(20, 2, 128) - z[..., None]) * s[..., None]).reshape(20, 256)
    assert level_one.abs().max() <= 128
    assert torch.equal(level_one * stored[f"{M}.weight_channel_scale"], dequantize(q))


def test_both_forms_of_integers_are_read() -> None:
    """W4A8 with one code to a byte, as compressed-tensors stores it unless told otherwise."""
    scheme = PRESETS["w4a8"]
    q = quantized(scheme)
    plain = {f"{M}.weight": q.codes, f"{M}.weight_scale": q.scales}
    assert same(decode(M, scheme, plain), q)


def test_old_files_with_unpacked_or_needless_zero_points() -> None:
    q = quantized(PRESETS["w4a16-asym"])
    stored = encode(M, PRESETS["w4a16-asym"], q, "bf16") | {f"{M}.weight_zero_point": q.zero_points}
    assert same(decode(M, PRESETS["w4a16-asym"], stored), q)
    q = quantized(PRESETS["w4a16"])
    stored = encode(M, PRESETS["w4a16"], q, "bf16")
    zeros = torch.zeros(20, 2, dtype=torch.int8)
    assert same(decode(M, PRESETS["w4a16"], stored | {f"{M}.weight_zero_point": zeros}), q)
    with pytest.raises(HalfbyteError, match="is not zero, but the weight's scheme is symmetric"):
        decode(M, PRESETS["w4a16"], stored | {f"{M}.weight_zero_point": zeros + 1})


def test_scales_in_other_shapes_and_dtypes() -> None:
    stored = encode(M, PRESETS["fp8"], quantized(PRESETS["fp8"]), "bf16")
    flat = stored | {f"{M}.weight_scale": stored[f"{M}.weight_scale"].reshape(20).float()}
    assert decode(M, PRESETS["fp8"], flat).scales.shape == (20, 1)
    assert decode(M, PRESETS["fp8"], flat).format.scale == "f32"
    scheme = PRESETS["mxfp4"]
    q = quantized(scheme)
    stored = encode(M, scheme, q, "bf16")
    exponents = stored[f"{M}.weight_scale"].view(torch.float8_e8m0fnu)
    assert same(decode(M, scheme, stored | {f"{M}.weight_scale": exponents}), q)


def test_activation_order() -> None:
    scheme = PRESETS["w4a16"]
    q = quantized(scheme)
    stored = encode(M, scheme, q, "bf16")
    in_order = torch.arange(256, dtype=torch.int32) // 128
    assert same(decode(M, scheme, stored | {f"{M}.weight_g_idx": in_order}), q)
    with pytest.raises(HalfbyteError, match="weight_g_idx: permutes groups"):
        decode(M, scheme, stored | {f"{M}.weight_g_idx": in_order.flip(0)})


@pytest.mark.parametrize("name", PRESETS)
def test_wrong_dtypes_and_shapes_are_named(name: str) -> None:
    """Eight nibbles to a word read as two to a byte, or the other way round, would be garbage."""
    scheme = PRESETS[name]
    stored = encode(M, scheme, quantized(scheme), "bf16")
    for key, tensor in stored.items():
        faults = [tensor.double(), torch.cat([tensor] * 9)]
        if (name, key) == ("fp8_per_tensor", f"{M}.weight"):
            faults.pop()  # one scale fits a weight of any shape
        for fault in faults:
            with pytest.raises(HalfbyteError, match=M.replace(".", r"\.")):
                decode(M, scheme, stored | {key: fault})


@pytest.mark.parametrize("name", PRESETS)
def test_missing_tensors_are_named_with_what_is_there(name: str) -> None:
    scheme = PRESETS[name]
    stored = encode(M, scheme, quantized(scheme), "bf16")
    renamed = {
        key.replace("weight_scale", "weights_scaling_factor"): tensor for key, tensor in stored.items()
    }
    with pytest.raises(
        HalfbyteError, match=r"missing .*weight_scale; found instead: .*weights_scaling_factor"
    ):
        decode(M, scheme, renamed)
    for key in stored:
        with pytest.raises(HalfbyteError, match=M):
            decode(M, scheme, {other: tensor for other, tensor in stored.items() if other != key})


def test_int32_and_uint8_packing_are_not_mixed_up() -> None:
    stored = encode(M, PRESETS["w4a16"], quantized(PRESETS["w4a16"]), "bf16")
    nibbles = stored[f"{M}.weight_packed"].view(torch.uint8)
    with pytest.raises(
        HalfbyteError, match=r"weight_packed: is U8 \[20, 128\], its scheme calls for I32 \[20, 32\]"
    ):
        decode(M, PRESETS["w4a16"], stored | {f"{M}.weight_packed": nibbles})


def test_schemes_without_a_stored_form() -> None:
    odd = Scheme("odd", TensorFormat("int3", "group", 32))
    with pytest.raises(HalfbyteError, match="packed 3-bit weights differ between versions"):
        stored_entries(M, odd, (8, 64), "bf16")
    lost = Scheme("lost", TensorFormat("e5m2", "channel"))
    with pytest.raises(HalfbyteError, match="scheme lost: compressed-tensors has no name"):
        stored_entries(M, lost, (8, 64), "bf16")
    with pytest.raises(HalfbyteError, match="group size 128 does not divide in_features 576"):
        stored_entries(M, PRESETS["w4a8"], (8, 576), "bf16")


def test_a_tensor_of_another_scheme_is_not_encoded() -> None:
    q = quantized(PRESETS["w4a16"])
    smaller = replace(PRESETS["w4a16"], weights=PRESETS["w4a16"].weights.with_group_size(64))
    for scheme, dtype in ((smaller, "bf16"), (PRESETS["w4a16"], "f16"), (PRESETS["w4a8-int8"], "bf16")):
        with pytest.raises(HalfbyteError, match=f"{M}: quantized as"):
            encode(M, scheme, q, dtype)
