"""Scales after a product, held to their definition in float64, and what the kernel becomes on GPUs."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.triton import scaled_product
from tests.kernels.compile_triton import Compiled, compile_for
from tests.kernels.triton.launches import Launch, Recorder
from tests.kernels.triton.runners import Runner

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype]
SHAPES = [(0, 64), (1, 4096), (2, 9), (7, 1000), (16, 1032), (33, 1), (64, 272), (5, 3001)]
DTYPES = (torch.bfloat16, torch.float16)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def arguments(
    rows: int, columns: int, dtype: torch.dtype, *, bias: bool = False, shared: bool = False
) -> Arguments:
    """Random numbers. shared: one scale for all tokens."""
    generator = torch.Generator().manual_seed(rows + columns)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return (
        normal(rows, columns) * 1000,
        torch.tensor([0.3]) if shared else normal(rows, 1).exp() * 0.01,
        normal(1, columns).exp() * 0.01,
        normal(columns).to(dtype) if bias else None,
        dtype,
    )


def assert_rounded_once(asked: Arguments, y: torch.Tensor) -> None:
    """``y`` is the result by the definition, but for its rounding to the dtype and fp32's before."""
    product, token_scale, channel_scale, bias, dtype = asked
    scaled = product.double() * token_scale.double() * channel_scale.double()
    want = scaled if bias is None else scaled + bias.double()
    assert (y.dtype, y.shape) == (dtype, want.shape)
    nearest = want.float().to(dtype)
    assert torch.equal(y.isnan(), nearest.isnan())
    assert torch.equal(y.isinf(), nearest.isinf())
    finite = nearest.isfinite()
    # A sum may be smaller than what fp32 rounds before it.
    bound = want.abs() * UNIT[dtype] + scaled.abs() * 2.0**-22 + SMALLEST[dtype]
    assert ((y.double() - want).abs() <= bound)[finite].all()
    assert torch.equal(y[~finite].nan_to_num(), nearest[~finite].nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_follow_the_definition(run: Runner, dtype: torch.dtype) -> None:
    cases = [
        arguments(*shape, dtype, bias=bias, shared=shared)
        for shape in SHAPES
        for bias, shared in ((False, False), (True, False), (True, True))
    ]
    for case, (y,) in zip(cases, run([("scale_product", case) for case in cases]), strict=True):
        assert_rounded_once(case, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hostile_scales_neither_vanish_nor_overflow_on_the_way(run: Runner, dtype: torch.dtype) -> None:
    # Products from the smallest of two E4M3 codes to the largest sum, each with every pair of scales.
    products = torch.tensor([2.0**-18, -1.5, 3e4, 448.0**2 * 16384])
    tokens = torch.tensor([2.0**-126, 1e-30, 1e-4, 1.0, 1e4, 1e30, 7e35])
    channels = torch.tensor([0.0, 1e-32, 1e-30, 1e-4, 1.0, 1e4])
    case = (
        products.repeat(len(tokens), len(channels)),
        tokens[:, None],
        channels.repeat_interleave(len(products))[None],
        None,
        dtype,
    )
    ((y,),) = run([("scale_product", case)])
    assert_rounded_once(case, y)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_rows_stay_alone(run: Runner, bad: float) -> None:
    clean = arguments(5, 1000, torch.bfloat16, bias=True)
    bad_product, bad_scale = clean[0].clone(), clean[1].clone()
    bad_product[1] = bad_scale[3] = bad
    results = run([("scale_product", clean), ("scale_product", (bad_product, bad_scale, *clean[2:]))])
    (want,), (y,) = results
    assert not y[[1, 3]].isfinite().any()
    assert torch.equal(y[[0, 2, 4]], want[[0, 2, 4]])


def test_inputs_may_lie_apart(run: Runner) -> None:
    product, token_scale, channel_scale, bias, dtype = arguments(4, 64, torch.bfloat16, bias=True)
    assert bias is not None
    apart = (
        torch.cat([product, product], dim=1)[:, :64],
        token_scale[:1].expand(4, 1),
        channel_scale.repeat_interleave(2, dim=1)[:, ::2],
        bias.repeat_interleave(2)[::2],
        dtype,
    )
    ((y,),) = run([("scale_product", apart)])
    assert_rounded_once(apart, y)


def test_fake_outputs_have_shape_and_dtype() -> None:
    with FakeTensorMode():
        product = torch.empty(9, 200, device="meta")
        y = scaled_product.scale_product(product, product[:, :1], product[:1], None, torch.float16)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((9, 200), torch.float16, True)


def refusals() -> list[tuple[tuple[object, ...], str]]:
    product, tokens, channels, bias, dtype = arguments(4, 64, torch.bfloat16, bias=True)
    assert bias is not None
    return [
        ((product.half(), tokens, channels, bias, dtype), r"all float32, not float16 \[4, 64\] on cpu"),
        ((product, tokens[:3], channels, bias, dtype), r"float32 \[3, 1\] on cpu and"),
        ((product, tokens, channels[:, :1], bias, dtype), r"and float32 \[1, 1\] on cpu"),
        ((product, tokens, channels, None, torch.float32), "rounds to bfloat16 or float16, not to float32"),
        ((product, tokens, channels, bias, torch.float16), r"bias \[64\] in float16 here, not bfloat16"),
        ((product, tokens, channels, bias[:3], dtype), r"bias \[64\] in bfloat16 here, not bfloat16 \[3\]"),
    ]


@pytest.mark.parametrize(("given", "message"), refusals())
def test_what_the_kernel_does_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: Arguments, message: str
) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    with pytest.raises(HalfbyteError, match=message) as caught:
        scaled_product.scale_product(*given)
    assert "\n" not in str(caught.value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What was launched so far."""
    made: list[Launch] = []
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)  # the CPU will do
    recorder = Recorder(scaled_product.scale_product_kernel, made)
    monkeypatch.setattr(scaled_product, "scale_product_kernel", recorder)
    return made


def compiled(launch: Launch, capability: int) -> Compiled:
    """As the launch would be made on such a GPU."""
    overlap = capability >= 90
    options = {**launch.options, "launch_pdl": overlap}
    return compile_for(launch.kernel, capability, {**launch.arguments, "PDL": overlap}, **options)


def test_nothing_spills(launches: list[Launch]) -> None:
    for columns in (9, 272, 4096, 28672):
        scaled_product.scale_product(*arguments(3, columns, torch.bfloat16, bias=True))
        scaled_product.scale_product(*arguments(3, columns, torch.float16, shared=True))
    for launch in launches:
        for capability in (89, 90):
            assert compiled(launch, capability).spills == 0, (launch.arguments, capability)


@pytest.mark.parametrize("columns", [4096, 1032])
def test_threads_take_16_bytes_at_a_time(launches: list[Launch], columns: int) -> None:
    scaled_product.scale_product(*arguments(3, columns, torch.bfloat16, bias=True))
    asm = compiled(launches[0], 90).asm
    # All but the scale of the token.
    assert re.findall(r"ld\.global\S*(?<!v4)\.b32", asm["ptx"]) == ["ld.global.b32"]
    assert set(re.findall(r"st\.global\S*", asm["ptx"])) == {"st.global.v4.b32"}
    assert "convert_layout" not in asm["ttgir"]


def test_memory_waits_for_the_kernel_in_front(launches: list[Launch]) -> None:
    scaled_product.scale_product(*arguments(3, 4096, torch.bfloat16, bias=True))
    before, after = compiled(launches[0], 90).asm["ptx"].split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert not re.search(r"(ld|st)\.global", before)
    assert "griddepcontrol" not in compiled(launches[0], 89).asm["ptx"] + after


def test_similar_numbers_of_tokens_compile_nothing_new(launches: list[Launch]) -> None:
    for rows in (33, 64, 128):
        scaled_product.scale_product(*arguments(rows, 272, torch.bfloat16))
    free = [parameter.name for parameter in launches[0].kernel.params if parameter.do_not_specialize]
    first, *others = (
        (launch.options, {name: value for name, value in launch.arguments.items() if name not in free})
        for launch in launches
    )
    assert all(other == first for other in others)


def test_torch_agrees_with_the_schema(launches: list[Launch]) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for bias in (False, True):
        given = arguments(3, 272, torch.bfloat16, bias=bias)
        torch.library.opcheck(torch.ops.halfbyte.scale_product.default, given, test_utils=checks)
