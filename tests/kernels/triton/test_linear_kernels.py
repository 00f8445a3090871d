"""What the portable GPU kernels take and refuse, and the weights that they keep, on any machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.problem import Kernel, LinearProblem
from halfbyte.kernels.scaled_mm import ScaledMM, ScaledMMBlocks
from halfbyte.kernels.triton import linear_conditions
from halfbyte.kernels.triton.linear_conditions import LARGEST_INT8_K
from halfbyte.schemes import PRESETS, Scheme
from tests.kernels.cases import random_weight, settled
from tests.kernels.triton.linear_cases import FP8, INT8, KERNELS, hostile_weight, int4, schemes

ALL: dict[str, Kernel] = {**KERNELS, "scaled-mm": ScaledMM(), "scaled-mm-blocks": ScaledMMBlocks()}
TWO_LEVELS = settled("w4a8-int8")
GROUPED_FP8 = ActivationFormat("e4m3", "group", 128)


def problem(scheme: Scheme, rows: int = 64, columns: int = 256, dtype: torch.dtype = torch.bfloat16):
    return LinearProblem(scheme, rows, columns, torch.device("cuda"), dtype)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """What ``torch.cuda`` says that the GPU is; a test may change it."""
    said = {"is": (9, 0)}
    monkeypatch.setattr(linear_conditions, "_capability", lambda device: said["is"])
    return said


def test_each_scheme_has_the_kernels_it_should(capability: dict) -> None:
    wanted = {
        "w4a8": ["triton-w4a8"],
        "w4a8-int8": ["triton-w4a8"],
        "w4a16": ["triton-w4a16"],
        "w4a16-asym": ["triton-w4a16"],
        "w8a16": ["triton-int8"],
        "w8a8-int8": ["triton-int8"],
        "fp8": ["triton-fp8", "scaled-mm"],
        "fp8_per_tensor": ["triton-fp8", "scaled-mm"],
        "fp8_per_block": ["triton-fp8"],
        "mxfp8": [],
        "mxfp4": [],
        "nvfp4": [],
    }
    assert set(wanted) == set(PRESETS)
    for name, kernels in wanted.items():
        able = [kernel for kernel in ALL if ALL[kernel].can_implement(problem(settled(name)))[0]]
        assert able == kernels, name
    for kernel, scheme, _ in schemes():
        assert ALL[kernel].can_implement(problem(scheme)) == (True, ""), scheme


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_inputs(capability: dict, dtype: torch.dtype) -> None:
    for kernel, scheme, _ in schemes():
        able, reason = ALL[kernel].can_implement(problem(scheme, dtype=dtype))
        assert able == (scheme.activations is not None or dtype != torch.float32), scheme
        assert able or "must be bfloat16 or float16, not float32" in reason


@pytest.mark.parametrize(
    ("kernel", "scheme", "reason"),
    [
        ("triton-w4a16", settled("w8a16"), "must be INT4 with one level"),
        ("triton-w4a16", replace(TWO_LEVELS, activations=None), "must be INT4 with one level"),
        ("triton-w4a16", Scheme("g16", int4(16)), "32, 64 or a multiple of 128"),
        ("triton-w4a16", Scheme("g192", int4(192)), "32, 64 or a multiple of 128"),
        ("triton-w4a16", Scheme("t", TensorFormat("int4", "tensor", scale="bf16")), "groups must be"),
        ("triton-w4a16", settled("w4a8"), "inputs must be plain"),
        ("triton-w4a8", settled("fp8"), "must be INT4 with floating-point scales, or integer scales"),
        ("triton-w4a8", settled("w4a16"), "must be E4M3 or INT8 with a scale per token or tensor"),
        ("triton-w4a8", Scheme("g", int4(128), GROUPED_FP8), "must be E4M3 or INT8 with a scale per token"),
        ("triton-w4a8", replace(TWO_LEVELS, activations=FP8), "inputs must be INT8 with a scale per token"),
        ("triton-w4a8", Scheme("g16", int4(16), FP8), "32, 64 or a multiple of 128"),
        ("triton-int8", settled("w4a16"), "must be symmetric INT8"),
        (
            "triton-int8",
            Scheme("a", TensorFormat("int8", "channel", symmetric=False, scale="f32"), INT8),
            "must be symmetric INT8",
        ),
        (
            "triton-int8",
            Scheme("g", TensorFormat("int8", "group", 128, scale="f32"), INT8),
            "with a scale per channel or tensor",
        ),
        (
            "triton-int8",
            Scheme("f", TensorFormat("int8", "channel", scale="f32"), FP8),
            "plain, or INT8 with a scale per token or tensor",
        ),
        ("triton-fp8", settled("mxfp8"), "must be E4M3 with a scale per channel, tensor or block"),
        ("triton-fp8", replace(settled("fp8_per_block"), activations=FP8), "as weights in blocks are"),
        ("triton-fp8", replace(settled("fp8"), activations=GROUPED_FP8), "with a scale per token or tensor"),
        ("triton-fp8", replace(settled("fp8"), activations=None), "inputs must be E4M3"),
        ("scaled-mm", settled("fp8_per_block"), "must be E4M3 with a scale per channel or tensor"),
        ("scaled-mm", replace(settled("fp8"), activations=INT8), "inputs must be E4M3"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_numbers_that_a_kernel_refuses(capability: dict, kernel: str, scheme: Scheme, reason: str) -> None:
    able, why = ALL[kernel].can_implement(problem(scheme))
    assert not able
    assert reason in why
    assert "\n" not in why


def test_shapes_that_a_kernel_refuses(capability: dict) -> None:
    wide = LARGEST_INT8_K + 1
    for kernel, scheme in (("triton-int8", settled("w8a8-int8")), ("triton-w4a8", TWO_LEVELS)):
        assert "int32 sums" in ALL[kernel].can_implement(problem(scheme, columns=wide))[1]
    assert ALL["triton-int8"].can_implement(problem(settled("w8a16"), columns=wide))[0]
    assert "multiple of 128" in ALL["triton-fp8"].can_implement(problem(settled("fp8_per_block"), 64, 96))[1]
    assert "multiples of 16" in ALL["scaled-mm"].can_implement(problem(settled("fp8"), 24, 256))[1]
    assert "multiples of 16" in ALL["scaled-mm"].can_implement(problem(settled("fp8"), 32, 200))[1]


def test_blocks_that_cublas_takes(capability: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, scheme = ALL["scaled-mm-blocks"], settled("fp8_per_block")

    def reason(*shape: int, dtype: torch.dtype = torch.bfloat16) -> str:
        return kernel.can_implement(problem(scheme, *shape, dtype=dtype))[1]

    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert reason(64, 512) == reason(144, 1536, dtype=torch.float16) == ""
    assert "multiple of 512" in reason(64, 384)
    assert "multiple of 16" in reason(24, 512)
    assert "not float32" in reason(64, 512, dtype=torch.float32)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA 12.9 on, not in 2.9.1+cu130 with CUDA 12.8" in reason(64, 512)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert "torch has it from 2.9" in reason(64, 512)
    capability["is"] = (10, 0)
    assert "compute capability 9.0" in reason(64, 512)


def test_results_that_scaled_mm_refuses(capability: dict) -> None:
    kernel = ALL["scaled-mm"]
    vectors, single = settled("fp8"), settled("fp8_per_tensor")
    assert kernel.can_implement(problem(single, dtype=torch.float16))[0]
    assert "bfloat16 for such" in kernel.can_implement(problem(vectors, dtype=torch.float16))[1]
    assert "not float32" in kernel.can_implement(problem(single, dtype=torch.float32))[1]


def test_gpus_that_a_kernel_refuses(capability: dict) -> None:
    capability["is"] = (8, 6)
    for kernel, scheme, _ in schemes():
        able, reason = ALL[kernel].can_implement(problem(scheme))
        fp8 = "e4m3" in (scheme.weights.element, scheme.activations and scheme.activations.element)
        assert able != fp8
        assert able or reason == "needs compute capability 8.9 or higher, not 8.6"
    capability["is"] = (7, 5)
    assert "8.0 or higher, not 7.5" in ALL["triton-w4a16"].can_implement(problem(settled("w4a16")))[1]


def test_machines_that_a_kernel_refuses(capability: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = replace(problem(settled("w4a16")), device=torch.device("cpu"))
    assert ALL["triton-w4a16"].can_implement(cpu) == (False, "runs on NVIDIA GPUs, not on cpu")
    monkeypatch.setattr(linear_conditions, "find_spec", lambda name: None)
    assert ALL["scaled-mm"].can_implement(problem(settled("fp8"))) == (False, "Triton is not installed")


def entries() -> list[tuple[str, Scheme, int]]:
    return [*schemes(), ("scaled-mm", settled("fp8"), 16), ("scaled-mm", settled("fp8_per_tensor"), 16)]


@settings(max_examples=120, deadline=None)
@given(
    entry=st.sampled_from(entries()),
    rows=st.integers(1, 70),
    columns=st.integers(1, 400),
    seed=st.integers(0, 999),
)
def test_restoring_is_bit_exact(entry: tuple[str, Scheme, int], rows: int, columns: int, seed: int) -> None:
    name, scheme, multiple = entry
    columns = -(-columns // multiple) * multiple
    q = hostile_weight(scheme, rows, columns, seed)
    at = LinearProblem(scheme, rows, columns, torch.device("cpu"), torch.bfloat16)
    input_scale = torch.tensor([0.5])
    prepared = ALL[name].prepare(q, at, input_scale)
    assert prepared.input_scale is input_scale
    assert_same(ALL[name].restore(prepared), q)


def assert_same(back: QuantizedTensor, q: QuantizedTensor) -> None:
    assert back.format == q.format
    for part in ("codes", "scales", "zero_points", "outer_scales"):
        was, now = getattr(q, part), getattr(back, part)
        assert (was is None) == (now is None)
        if was is not None:
            assert (now.dtype, now.shape) == (was.dtype, was.shape)
            assert now.is_contiguous()
            assert torch.equal(now.view(torch.uint8), was.contiguous().view(torch.uint8))


def test_two_level_values_beyond_int8_are_refused() -> None:
    q = random_weight(TWO_LEVELS, 16, 128)
    q.codes[3, 5], q.zero_points[3, 0], q.scales[3, 0] = 7, -8, 16  # type: ignore[index]
    with pytest.raises(HalfbyteError, match=r"^two-level INT4 weights hold values in \[.*, 240\], outside"):
        KERNELS["triton-w4a8"].prepare(q, problem(TWO_LEVELS, 16, 128))


def test_packed_weights_take_half_a_byte_each() -> None:
    for name, scheme in (("triton-w4a16", settled("w4a16")), ("triton-w4a8", settled("w4a8"))):
        q = random_weight(scheme, 64, 1024)
        codes = KERNELS[name].prepare(q, problem(scheme, 64, 1024)).tensors["codes"]
        assert codes.nbytes == 64 * 1024 // 2
