"""What the portable GEMM kernels become on GPUs: compiled here, without one, for the launches that are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from halfbyte.kernels.problem import LinearProblem, Prepared
from halfbyte.kernels.scaled_mm import ScaledMM
from halfbyte.kernels.triton import linear_inputs, linear_parts, linear_w4a8, linear_w4a16, linear_w8
from halfbyte.kernels.triton.linear_layout import byte_span
from halfbyte.kernels.triton.linear_plan import Gpu
from tests.kernels.cases import settled
from tests.kernels.triton.launches import Launch, Recorder
from tests.kernels.triton.linear_cases import KERNELS, case_of, schemes

GPUS = {80: Gpu(80, 108), 89: Gpu(89, 142), 90: Gpu(90, 132)}
ROWS, INPUTS = 4096, 4096
FP8 = torch.float8_e4m3fn
LAUNCHED = (
    (linear_w4a16, "w4a16_kernel"),
    (linear_w4a8, "w4a8_kernel"),
    (linear_w8, "w8_kernel"),
    (linear_parts, "_add_parts_kernel"),
    (linear_inputs, "largest_of_rows_kernel"),
    (linear_inputs, "quantize_by_scale_kernel"),
    (linear_inputs, "quantize_groups_kernel"),
)

LAYERS = {**KERNELS, "scaled-mm": ScaledMM()}


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What was launched so far."""
    made: list[Launch] = []
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)  # any device will do
    for module, name in LAUNCHED:
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), made))
    return made


def w4a16(tokens: int, gpu: Gpu, dtype: torch.dtype, group: int, zeros: bool) -> None:
    groups = INPUTS // group
    linear_w4a16.multiply(
        empty(dtype, tokens, INPUTS),
        empty(torch.int16, INPUTS // 128, ROWS, 32),
        empty(torch.bfloat16, groups, ROWS),
        empty(torch.int16, groups, ROWS) if zeros else None,
        empty(dtype, ROWS),
        group,
        linear_w4a16.plan_for(tokens, ROWS, INPUTS, group, gpu),
    )


def w4a8(
    tokens: int, gpu: Gpu, codes: torch.dtype, group: int, zeros: bool, scales: torch.dtype = torch.bfloat16
) -> None:
    groups, span = INPUTS // group, byte_span(group)
    linear_w4a8.multiply(
        empty(codes, tokens, INPUTS),
        empty(torch.float32, tokens, 1),
        empty(torch.uint8, INPUTS // span, ROWS, span // 2),
        empty(scales, groups, ROWS),
        empty(torch.int8, groups, ROWS) if zeros else None,
        empty(torch.float32, ROWS, 1) if scales == torch.int8 else None,
        empty(torch.bfloat16, ROWS),
        group,
        torch.bfloat16,
        linear_w4a8.plan_for(tokens, ROWS, INPUTS, group, gpu),
    )


def w8(tokens: int, gpu: Gpu, inputs: torch.dtype, blocks: bool = False) -> None:
    plain = inputs.is_floating_point and inputs != FP8
    linear_w8.multiply(
        empty(inputs, tokens, INPUTS),
        None if plain else empty(torch.float32, *((INPUTS // 128, tokens) if blocks else (tokens, 1))),
        empty(torch.int8 if plain else inputs, ROWS, INPUTS),
        empty(torch.bfloat16, *((ROWS // 128, INPUTS // 128) if blocks else (ROWS, 1))),
        empty(torch.bfloat16, ROWS),
        blocks,
        torch.bfloat16,
        linear_w8.plan_for(tokens, ROWS, INPUTS, inputs, gpu),
    )


def layers(capability: int) -> Iterator[tuple[str, str, Callable[[int, Gpu], None]]]:
    """Name, the tensor core instruction that must be in its PTX, and what launches it, by tokens and GPU."""
    wide = capability >= 90
    floats = {
        torch.bfloat16: "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16" if wide else "f32.bf16.bf16.f32",
        torch.float16: "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16" if wide else "f32.f16.f16.f32",
    }
    integers = "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8" if wide else "satfinite.s32.s8.s8.s32"
    bytes_ = "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3" if wide else "f32.e4m3.e4m3.f32"
    for dtype, group, zeros in (
        (torch.bfloat16, 128, False),
        (torch.float16, 128, True),
        (torch.bfloat16, 64, True),
        (torch.bfloat16, 32, True),
    ):
        yield (
            f"w4a16 {dtype} {group} {zeros}",
            floats[dtype],
            lambda tokens, gpu, d=dtype, g=group, z=zeros: w4a16(tokens, gpu, d, g, z),
        )
    yield "w4a8 int8", integers, lambda tokens, gpu: w4a8(tokens, gpu, torch.int8, 128, True)
    yield "w4a8 int8 32", integers, lambda tokens, gpu: w4a8(tokens, gpu, torch.int8, 32, True)
    yield (
        "w4a8 two levels",
        integers,
        lambda tokens, gpu: w4a8(tokens, gpu, torch.int8, 128, True, torch.int8),
    )
    yield "w8a8 int8", integers, lambda tokens, gpu: w8(tokens, gpu, torch.int8)
    for dtype in floats:
        yield f"w8a16 {dtype}", floats[dtype], lambda tokens, gpu, d=dtype: w8(tokens, gpu, d)
    if capability >= 89:
        for group, zeros in ((128, False), (128, True), (64, True), (32, True)):
            yield (
                f"w4a8 fp8 {group} {zeros}",
                bytes_,
                lambda tokens, gpu, g=group, z=zeros: w4a8(tokens, gpu, FP8, g, z),
            )
        yield "fp8", bytes_, lambda tokens, gpu: w8(tokens, gpu, FP8)
        yield "fp8 blocks", bytes_, lambda tokens, gpu: w8(tokens, gpu, FP8, blocks=True)


def check(launches: list[Launch], capability: int, tokens: int) -> None:
    gpu = GPUS[capability]
    for name, instruction, launch in layers(capability):
        launches.clear()
        launch(tokens, gpu)
        gemm, *sums = (each.compiled(capability) for each in launches)
        assert gemm.spills == 0, (name, tokens, gemm)
        assert gemm.shared <= gpu.shared_bytes, (name, tokens, gemm)
        assert instruction.format(n=launches[0].arguments["TOKENS"]) in gemm.asm["ptx"], (name, tokens)
        assert all(each.spills == 0 for each in sums), (name, tokens)


@pytest.mark.parametrize(("capability", "tokens"), [(80, 1), (80, 4096), (89, 4096), (90, 1), (90, 4096)])
def test_nothing_spills_and_tensor_cores_multiply(
    launches: list[Launch], capability: int, tokens: int
) -> None:
    check(launches, capability, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "tokens"), [(80, 32), (80, 64), (89, 1), (89, 32), (89, 64), (90, 32), (90, 64)]
)
def test_tiles_in_between_do_not_spill_either(launches: list[Launch], capability: int, tokens: int) -> None:
    check(launches, capability, tokens)


def test_quantizers_do_not_spill(launches: list[Launch]) -> None:
    x = torch.empty(3, 512, dtype=torch.bfloat16)
    linear_inputs.quantize_by_scale(x, torch.ones(1), torch.int8)
    linear_inputs.quantize_by_scale(x, torch.ones(1), FP8)
    linear_inputs.quantize_fp8_per_group(x)
    linear_inputs.quantize_per_tensor(x, torch.int8)
    linear_inputs.quantize_per_tensor(x.repeat(1, 40), FP8)
    linear_inputs.quantize_per_tensor(x[:, :1], torch.int8)
    for launch, capability in zip(launches, (80, 89, 90, 80, 80, 90, 90, 90, 80), strict=True):
        assert launch.compiled(capability).spills == 0


def test_numbers_of_tokens_compile_nothing_new() -> None:
    # They, and what follows from them.
    for module, name in LAUNCHED:
        for parameter in getattr(module, name).params:
            if parameter.name in ("tokens", "spans", "steps", "groups", "count"):
                assert parameter.do_not_specialize, (name, parameter.name)


def test_outputs_are_known_before_they_are_computed() -> None:
    x, out = empty(torch.bfloat16, 5, 256), {"dtype": torch.float16}
    codes, scale = empty(FP8, 5, 256), empty(torch.float32, 5, 1)
    scales = empty(torch.bfloat16, 2, 96)
    ops = torch.ops.halfbyte
    results = [
        ops.triton_w4a16(x, empty(torch.int16, 2, 96, 32), scales, None, None, 128),
        ops.triton_w4a8(codes, scale, empty(torch.uint8, 2, 96, 64), scales, None, None, None, 128, **out),
        ops.triton_w8(codes, scale, empty(FP8, 96, 256), empty(torch.bfloat16, 96, 1), None, False, **out),
    ]
    assert [(y.shape, y.dtype) for y in results] == [
        ((5, 96), torch.bfloat16),
        ((5, 96), torch.float16),
        ((5, 96), torch.float16),
    ]
    grouped, group_scales = ops.quantize_fp8_per_group(x)
    assert (grouped.shape, grouped.dtype) == (x.shape, FP8)
    assert (group_scales.shape, group_scales.dtype) == ((2, 5), torch.float32)
    assert ops.quantize_by_scale(x, empty(torch.float32, 1), torch.int8).dtype == torch.int8
    codes, scale = ops.quantize_per_tensor(x, FP8)
    assert (codes.shape, codes.dtype, scale.shape, scale.dtype) == (x.shape, FP8, (1,), torch.float32)


@pytest.mark.parametrize("kernel", LAYERS)
def test_layers_are_traced_in_one_graph(kernel: str) -> None:
    entries = [scheme for name, scheme, _ in schemes() if name == kernel]
    entries = entries or [settled("fp8"), settled("fp8_per_tensor")]
    chosen = LAYERS[kernel]
    single = [one for one in entries if one.activations and one.activations.granularity == "tensor"]
    for scheme in [*entries[:: max(1, len(entries) // 3)], *single]:
        case = case_of("", scheme, (5, 64, 256), torch.bfloat16)
        problem = LinearProblem(scheme, 64, 256, torch.device("cpu"), torch.bfloat16)
        prepared = chosen.prepare(case.weight, problem, case.input_scale)
        tensors = {name: tensor.to("meta") for name, tensor in prepared.tensors.items()}
        scale = None if case.input_scale is None else case.input_scale.to("meta")
        there = Prepared(problem, tensors, scale)
        torch.compiler.reset()
        traced = torch.compile(
            lambda x, to=there: chosen.run(x, to), backend="eager", fullgraph=True, dynamic=True
        )
        for tokens in (5, 3):
            y = traced(case.x[:tokens].to("meta"))
            assert (y.shape, y.dtype) == ((tokens, 64), torch.bfloat16)
