"""The kernels for one token on a fixed cache, held to what they mean in torch and in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.cached_attention import HeadNorms, rotate_and_store
from halfbyte.kernels.triton import rotary
from halfbyte.kernels.triton.decode_attention import attend_kernel, attend_layout
from halfbyte.kernels.triton.rotary import rotate_kernel
from tests.kernels.attention_cases import angles, cache, exact_attention, normal, visible
from tests.kernels.compile_triton import compile_for
from tests.kernels.triton.attention_runners import Runner, interpreted, on_gpu
from tests.kernels.triton.launches import Launch, Recorder
from tests.kernels.triton.runners import Call

# batch, query heads, key heads, slots, head size, the new token's slot.
SHAPES = [
    (1, 4, 2, 300, 64, 280),
    (2, 2, 2, 128, 32, 0),
    (1, 20, 1, 192, 128, 191),
    (2, 4, 1, 160, 16, 64),
]
LARGER = [
    (1, 32, 8, 640, 128, 639),
    (1, 32, 8, 8192, 128, 5000),
    (16, 32, 8, 640, 128, 513),
    (64, 28, 4, 256, 128, 100),
    (300, 14, 2, 128, 64, 127),
]
ops = torch.ops.halfbyte
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Runner:
    return interpreted if request.param == "interpreter" else on_gpu


@pytest.fixture
def shapes(run: Runner) -> list[tuple[int, ...]]:
    return SHAPES if run is interpreted else SHAPES + LARGER


def attention_call(shape: tuple[int, ...], dtype: torch.dtype) -> Call:
    """On a cache that holds NaN where nothing is visible."""
    batch, heads, kv_heads, length, head, slot = shape
    keys, values = cache(batch, kv_heads, length, head, dtype)
    seen = visible(batch, length, slot)
    for tensor in (keys, values):
        tensor.masked_fill_(~seen[:, None, :, None], torch.nan)
    arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32)
    query = normal(batch, heads, head, dtype=dtype)
    return ("attend_one", (query, keys, values, seen, torch.tensor([slot]), head**-0.5, arrivals))


def test_attention_is_exact_and_sees_nothing_hidden(run: Runner, shapes: list[tuple[int, ...]]) -> None:
    # The interpreter multiplies the bits of BF16.
    dtypes = (torch.float16, torch.float32, *([] if run is interpreted else [torch.bfloat16]))
    calls = [attention_call(shape, dtype) for shape in shapes for dtype in dtypes]
    for (_, given), (found, *left) in zip(calls, run(calls), strict=True):
        query, keys, values, seen, _, scale, _ = given
        want = exact_attention(query, keys, values, seen, scale)
        tolerance = TOLERANCE[query.dtype]
        torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance)
        assert found.dtype == query.dtype
        assert not left[-1].any(), "the kernel must leave its scratch as it found it"


@pytest.mark.gpu
def test_the_same_bits_twice() -> None:
    call = attention_call((1, 32, 8, 2048, 128, 2000), torch.bfloat16)
    first, *others = (results[0] for results in on_gpu([call] * 5))
    assert all(torch.equal(first, other) for other in others)


def rotation_call(shape: tuple[int, ...], dtype: torch.dtype, normed: bool) -> Call:
    batch, heads, kv_heads, length, head, slot = shape
    width = (heads + 2 * kv_heads) * head
    norms: tuple[Any, ...] = (None, None, 0.0)
    if normed:
        norms = (*(1 + 0.1 * normal(2, head, seed=5)).to(dtype), 1e-6)
    cos, sin = angles(batch, head, dtype)
    keys, values = cache(batch, kv_heads, length, head, dtype)
    qkv = normal(batch, width + 32, dtype=dtype)[:, :width]
    return ("rotate_and_store", (qkv, cos, sin, *norms, keys, values, torch.tensor([slot])))


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_rotation_is_that_of_torch(run: Runner, shapes: list[tuple[int, ...]], normed: bool) -> None:
    calls = [
        rotation_call(shape, dtype, normed)
        for shape in shapes
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    for (_, given), results in zip(calls, run(calls), strict=True):
        qkv, cos, sin, q_weight, k_weight, eps, keys, values, position = given
        keys, values = keys.clone(), values.clone()
        norms = HeadNorms(q_weight, k_weight, eps) if normed else None
        query = rotate_and_store(qkv, cos, sin, norms, keys, values, position)
        found_query, *left = results
        for found, want in ((found_query, query), (left[6], keys), (left[7], values)):
            if not normed:
                assert torch.equal(found, want)
                continue
            # Squares may be added in another order, and roots be off by two units of fp32, which all fp32 results
            # show and few of 16 bits.
            step = torch.finfo(qkv.dtype).eps
            torch.testing.assert_close(found, want, rtol=4 * step, atol=4 * step)
            assert qkv.dtype == torch.float32 or (found == want).double().mean() > 0.98


def test_nothing_for_no_sequences() -> None:
    shape = (0, 8, 2, 128, 64, 3)
    calls = [attention_call(shape, torch.float16), rotation_call(shape, torch.float16, False)]
    assert [results[0].shape for results in interpreted(calls)] == [(0, 8, 64), (0, 8, 64)]


def test_fake_outputs_have_the_shapes() -> None:
    shape = (3, 8, 2, 128, 64, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _, attention = attention_call(shape, torch.float16)
        assert ops.attend_one(*attention).shape == (3, 8, 64)
        _, rotation = rotation_call(shape, torch.bfloat16, True)
        query = ops.rotate_and_store(*rotation)
    assert (query.shape, query.dtype) == ((3, 8, 64), torch.bfloat16)


def test_what_no_kernel_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values, *rest = attention_call((3, 8, 2, 128, 64, 3), torch.float16)[1]
    with pytest.raises(HalfbyteError, match="attend_one runs on a CUDA device, not on cpu"):
        ops.attend_one(query, keys, values, *rest)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    with pytest.raises(HalfbyteError, match="contiguous keys and values of one shape"):
        ops.attend_one(query, keys, values[:, :, ::2], *rest)
    with pytest.raises(HalfbyteError, match=r"the cache alike, not float32 \[3, 8, 64\] on cpu with float16"):
        ops.attend_one(query.float(), keys, values, *rest)
    odd = [torch.zeros(3, 2, 128, 96, dtype=torch.float16) for _ in range(2)]
    with pytest.raises(HalfbyteError, match="not of 96"):
        ops.attend_one(query, *odd, *rest)
    with pytest.raises(HalfbyteError, match="a cache of 2 sequences here, not of 3"):
        ops.attend_one(query[:2], keys, values, *rest)


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize(
    ("head", "group", "splits", "dtype"),
    [
        (128, 4, 1, torch.bfloat16),
        (128, 4, 10, torch.float16),
        (128, 8, 16, torch.bfloat16),
        (64, 7, 4, torch.bfloat16),
        (256, 2, 16, torch.bfloat16),
        (128, 32, 2, torch.bfloat16),
        (128, 4, 2, torch.float32),
        (16, 1, 1, torch.bfloat16),
    ],
)
def test_attention_fits_the_chip(
    capability: int, head: int, group: int, splits: int, dtype: torch.dtype
) -> None:
    parts = dict.fromkeys(("parts", "tops", "totals"), torch.float32)
    layout = attend_layout(group, head, dtype)
    options = {name: layout.pop(name) for name in ("num_warps", "num_stages")}
    arguments = {
        **dict.fromkeys(("query", "keys", "values", "output"), dtype),
        **(parts if splits > 1 else dict.fromkeys(parts)),
        **layout,
        **{"visible": "*i1", "position": torch.int64, "arrivals": torch.int32},
        **{"visible_stride": 640, "length": 640, "scale": 0.1},
        **{"KV_HEADS": 8, "SPLITS": splits, "PDL": capability >= 90},
    }
    compiled = compile_for(attend_kernel, capability, arguments, launch_pdl=capability >= 90, **options)
    assert compiled.spills == 0
    assert compiled.shared <= 99 << 10, "more than a GPU of compute capability 8.9 has"
    assert "async_copy" in compiled.asm["ttgir"], "keys and values are not fetched ahead"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_rounded_before_they_are_added(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)  # any device will do
    monkeypatch.setattr(rotary, "rotate_kernel", Recorder(rotate_kernel, launches))
    ops.rotate_and_store(*rotation_call((3, 8, 2, 128, 64, 3), dtype, False)[1])
    (launch,) = launches
    assert "fma" not in launch.compiled(90).asm["ptx"]


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_rotation_does_not_spill(capability: int) -> None:
    arguments = {
        **dict.fromkeys(("qkv", "cos", "sin", "q_weight", "k_weight", "query", "keys", "values"), torch.bfloat16),
        "position": torch.int64, "qkv_stride": 6144, "angle_stride": 128, "length": 640, "eps": 1e-6,
        "Q_HEADS": 32, "KV_HEADS": 8, "HEAD": 128, "HALF": 64, "PDL": capability >= 90,
    }  # fmt: skip
    assert compile_for(rotate_kernel, capability, arguments, num_warps=1).spills == 0
