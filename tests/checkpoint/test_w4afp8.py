"""SGLang's w4afp8: read by its definition, written in it, refused where it is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.checkpoint.detect import detect
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.w4afp8 import decode, encode, stored_entries
from halfbyte.checkpoint.w4afp8_config import dense_scheme, experts_scheme
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.kernels.reference import reference_linear
from tests.checkpoint.files import CONFIG, write_checkpoint

EXPERT = "model.layers.1.mlp.experts.3.gate_proj"
DENSE = "model.layers.1.self_attn.o_proj"
EXPERTS, BLOCKS = experts_scheme(), dense_scheme()


def golden() -> dict[str, torch.Tensor]:
    """A projection of an expert with 2 outputs and 128 inputs, by hand.

    A byte holds two codes in two's complement, that of the even input in its low half. Row 0 begins with 0x1F (low 0xF
    is 15 - 16 = -1, high 0x1 is 1), 0x87 (7, 8 - 16 = -8) and 0xF0 (0, -1); row 1 with 0x7C (12 - 16 = -4, 7). The rest
    is 0. Each row is one group of 128, whose scale multiplies.
    """
    weight = torch.zeros(2, 64, dtype=torch.uint8)
    weight[0, :3] = torch.tensor([0x1F, 0x87, 0xF0])
    weight[1, 0] = 0x7C
    return {
        f"{EXPERT}.weight": weight.view(torch.int8),
        f"{EXPERT}.weight_scale_inv": torch.tensor([[0.5], [0.25]]),
        f"{EXPERT}.input_scale": torch.tensor([4.0], dtype=torch.bfloat16),
    }


def refusal(call: Callable[[], object]) -> str | None:
    try:
        call()
    except HalfbyteError as error:
        return str(error)
    return None


def test_experts_by_hand() -> None:
    found = dequantize(decode(EXPERT, EXPERTS, golden()))
    want = torch.zeros(2, 128)
    want[0, :6] = torch.tensor([-0.5, 0.5, 3.5, -4.0, 0.0, -0.5])
    want[1, :2] = torch.tensor([-1.0, 1.75])
    assert torch.equal(found.float(), want)


def test_inputs_by_hand() -> None:
    # Divided by 4, inputs 0.3 and 1000 are 0.075 and 250. E4M3 has steps of 1/128 around the first (9.6 of them: 10,
    # 0.078125) and of 16 around the second (15.6 of them: 16, 256). So the layer sees 0.3125 and 1024.
    q = decode(EXPERT, EXPERTS, golden())
    x = torch.zeros(1, 128)
    x[0, :2] = torch.tensor([0.3, 1000.0])
    found = reference_linear(x, q, EXPERTS.activations, input_scale=torch.tensor([4.0]))
    assert found.tolist() == [[0.5 * 1024 - 0.5 * 0.3125, 1.75 * 1024 - 0.3125]]
    # Undivided, 1000 is beyond E4M3, whose largest number is 448.
    found = reference_linear(x, q, EXPERTS.activations, input_scale=torch.tensor([1.0]))
    assert found.tolist() == [[0.5 * 448 - 0.5 * 0.3125, 1.75 * 448 - 0.3125]]


def test_blocks_by_hand() -> None:
    # 130 x 129 is 2 x 2 blocks, the last row and column of them 2 rows high and 1 column wide.
    weight = torch.ones(130, 129).to(torch.float8_e4m3fn)
    scales = torch.tensor([[2.0, 3.0], [5.0, 7.0]])
    found = dequantize(
        decode(DENSE, BLOCKS, {f"{DENSE}.weight": weight, f"{DENSE}.weight_scale_inv": scales})
    ).float()
    assert [found[0, 0], found[0, 128], found[128, 127], found[129, 128]] == [2, 3, 5, 7]
    assert found.unique().tolist() == [2, 3, 5, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_in_other_dtypes_are_read_and_kept(dtype: torch.dtype, of_input: torch.dtype) -> None:
    tensors = golden()
    tensors[f"{EXPERT}.weight_scale_inv"] = tensors[f"{EXPERT}.weight_scale_inv"].to(dtype)
    tensors[f"{EXPERT}.input_scale"] = torch.tensor(4.0, dtype=of_input)
    q = decode(EXPERT, EXPERTS, tensors)
    assert q.scales.dtype == dtype
    assert torch.equal(dequantize(q), dequantize(decode(EXPERT, EXPERTS, golden())))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.booleans())
def test_what_is_written_is_read(seed: int, experts: bool) -> None:
    scheme = EXPERTS if experts else BLOCKS
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(seed))
    q = quantize(weight, scheme.weights.with_scale("bf16"))
    stored = encode(EXPERT, scheme, q, "bf16")
    entries = stored_entries(EXPERT, scheme, (24, 256), "bf16")
    assert [entry.name for entry in entries] == list(stored)
    assert all(tuple(stored[entry.name].shape) == entry.shape for entry in entries)
    assert stored[f"{EXPERT}.weight_scale_inv"].dtype is torch.float32
    again = decode(EXPERT, scheme, stored)
    assert torch.equal(again.codes.view(torch.int8), q.codes.view(torch.int8))
    # fp32 holds what was rounded to bf16, which is what SGLang multiplies with.
    assert torch.equal(again.scales, q.scales.float())
    if experts:
        assert stored[f"{EXPERT}.input_scale"].tolist() == [1.0]


def test_input_scales_are_stored_in_bf16() -> None:
    q = quantize(torch.randn(8, 128), EXPERTS.weights.with_scale("bf16"))
    stored = encode(EXPERT, EXPERTS, q, "bf16", input_scale=torch.tensor([0.0185546875]))
    scale = stored[f"{EXPERT}.input_scale"]
    assert (scale.dtype, scale.tolist()) == (torch.bfloat16, [0.0185546875])


@pytest.mark.parametrize("leaf", ["weight", "weight_scale_inv", "input_scale"])
def test_missing_tensors_are_named(leaf: str) -> None:
    tensors = golden()
    del tensors[f"{EXPERT}.{leaf}"]
    with pytest.raises(HalfbyteError, match=rf"missing.*{EXPERT}\.{leaf}"):
        decode(EXPERT, EXPERTS, tensors)


@pytest.mark.parametrize(
    ("leaf", "value", "words"),
    [
        ("weight", torch.zeros(2, 64), r"is F32 \[2, 64\], its scheme calls for I8 \[2, 64\]"),
        ("weight", torch.zeros(2, 64, dtype=torch.uint8), "is U8"),
        ("weight", torch.zeros(2, 128).to(torch.float8_e4m3fn), r"is F8_E4M3 \[2, 128\].*calls for I8"),
        ("weight", torch.zeros(128, dtype=torch.int8), r"is \[128\]; accepted: two dimensions"),
        ("weight", torch.zeros(2, 40, dtype=torch.int8), "80 inputs are no whole groups; accepted: multiples of 128"),
        ("weight_scale_inv", torch.ones(2, 2), r"is F32 \[2, 2\], its scheme calls for F32 \[2, 1\]"),
        ("weight_scale_inv", torch.ones(2, 1).half(), "is F16"),
        ("weight_scale_inv", torch.tensor([[1.0], [-1.0]]), r"holds -1 at \[1, 0\]; accepted: finite, not negative"),
        ("weight_scale_inv", torch.tensor([[torch.inf], [1.0]]), r"holds inf at \[0, 0\]"),
        ("weight_scale_inv", torch.tensor([[torch.nan], [1.0]]), r"holds nan at \[0, 0\]"),
        ("input_scale", torch.tensor([0.0]), "holds 0 at.*accepted: a positive finite number"),
        ("input_scale", torch.tensor([-1.0]), "holds -1"),
        ("input_scale", torch.tensor([torch.nan]), "holds nan"),
        ("input_scale", torch.ones(2), r"is F32 \[2\]"),
        ("input_scale", torch.ones(1, dtype=torch.int8), "is I8"),
    ],
)  # fmt: skip
def test_misfits_are_named(leaf: str, value: torch.Tensor, words: str) -> None:
    with pytest.raises(HalfbyteError, match=rf"^{EXPERT}\.{leaf}: {words}"):
        decode(EXPERT, EXPERTS, {**golden(), f"{EXPERT}.{leaf}": value})


DTYPES = (
    torch.int8,
    torch.uint8,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int32,
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.sampled_from([0, 1, 2, 3, 64, 128]), max_size=3),
            st.booleans(),
        ),
        min_size=3,
        max_size=3,
    ),
    st.booleans(),
)
def test_any_tensors_are_read_or_refused_in_one_line(parts: list[Any], experts: bool) -> None:
    leaves = ("weight", "weight_scale_inv", "input_scale")
    tensors = {
        f"{EXPERT}.{leaf}": torch.ones(shape).to(dtype)
        for leaf, (dtype, shape, there) in zip(leaves, parts, strict=True)
        if there
    }
    said = refusal(lambda: decode(EXPERT, EXPERTS if experts else BLOCKS, tensors))
    assert said is None or (EXPERT in said and "\n" not in said)


@pytest.mark.parametrize(
    ("scheme", "shape", "words"),
    [
        (EXPERTS, (8, 192), "group size 128 does not divide"),
    ],
)
def test_what_this_form_cannot_store(scheme: Any, shape: tuple[int, int], words: str) -> None:
    with pytest.raises(HalfbyteError, match=words):
        stored_entries(EXPERT, scheme, shape, "bf16")


def test_told_from_config_json_and_without_it(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "w4afp8"}}
    said = Checkpoint.open(
        write_checkpoint(tmp_path / "said", {"model.safetensors": golden()}, config=config)
    )
    found = detect(said)
    assert (found.format, found.readable) == ("w4afp8", True)
    assert found.stored is not None
    assert found.stored.form == "w4afp8"
    # The first files of this kind say it nowhere; ModelOpt's file beside them tells half of it.
    silent = write_checkpoint(tmp_path / "silent", {"model.safetensors": golden()})
    (silent / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MIXED_PRECISION"}}')
    found = detect(Checkpoint.open(silent))
    assert (found.format, found.readable) == ("w4afp8 without config", False)
    assert f"{EXPERT}.weight is INT8" in found.why
    assert '{"quant_method": "w4afp8"}' in found.why
