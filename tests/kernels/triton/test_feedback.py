"""A block of GPTQ in one launch, held to its definition: column by column in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte.algorithms import column_feedback
from halfbyte.algorithms.column_feedback import round_with_feedback
from halfbyte.errors import HalfbyteError
from halfbyte.formats.columns import ColumnRounding, Columns
from halfbyte.formats.grid import Grid, Ranges, choose_grid
from halfbyte.formats.spec import TensorFormat
from halfbyte.formats.vllm_rounding import VllmRounding
from halfbyte.kernels.triton import feedback
from tests.formats.hostile import FORMATS
from tests.kernels.triton.launches import Launch, Recorder
from tests.kernels.triton.runners import Call, Runner

INTEGERS = [name for name, fmt in FORMATS.items() if fmt.is_integer]
# Columns of two groups, rows for two programs and a rest.
SHAPE = (37, 48)


class Taken:
    """Stands in for ``torch.ops.halfbyte``: keeps the call that it gets."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            self.calls.append((name, arguments))
            return torch.empty_like(arguments[0]), torch.empty_like(arguments[0])

        return call


def block(fmt: TensorFormat, *lead: int, own_shares: bool = False) -> tuple[Columns, list[torch.Tensor]]:
    """Columns 104 to 151 of a weight, backwards, and numbers of few bits: sums are exact and there are many ties."""
    generator = torch.Generator().manual_seed(0)

    def eighths(*shape: int, most: int = 400) -> torch.Tensor:
        return torch.randint(-most, most, shape, generator=generator) / 8.0

    rows, width = SHAPE[0], 256
    shape = (*lead, rows, width)
    places = fmt.scale_shape(shape)
    scales = 2.0 ** torch.randint(0, 3, places, generator=generator)
    zero_points = None if fmt.symmetric else torch.randint(-3, 4, places, generator=generator).to(torch.int8)
    outer = {
        None: None,
        "channel": torch.full((*lead, rows, 1), 0.5),
        "tensor": torch.full((*lead, 1, 1), 0.5),
    }[fmt.outer]
    rounding = ColumnRounding.of(fmt, Grid(scales, zero_points, outer), shape)
    columns = rounding.at(torch.arange(151, 103, -1))
    shares = eighths(*(lead if own_shares else ()), SHAPE[1], SHAPE[1], most=2)
    return columns, [eighths(*lead, *SHAPE), eighths(*lead, *SHAPE), shares]


def asked(columns: Columns, tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Call:
    """What the GPU is asked to do."""
    taken = Taken()
    monkeypatch.setattr(column_feedback, "triton_ops", lambda: taken)
    assert column_feedback._on_gpu(columns, *(tensor.clone() for tensor in tensors)) is not None
    return taken.calls[0]


CASES = [(name, lead, own) for name in INTEGERS for lead, own in (((), False), ((2, 2), True), ((3,), False))]


def test_integers_follow_the_definition(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block(FORMATS[name], *lead, own_shares=own) for name, lead, own in CASES]
    found = run([asked(*case, monkeypatch) for case in blocks])
    for case, (columns, tensors), (codes, errors) in zip(CASES, blocks, found, strict=True):
        wanted, left = round_with_feedback(columns, *(tensor.clone() for tensor in tensors))
        assert torch.equal(codes.view(wanted.shape), wanted), case
        assert torch.equal(errors.view(left.shape), left), case


def test_any_scales_and_shares(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums are not exact, the kernel's are as good as torch's: few values lie on a boundary between codes."""
    generator = torch.Generator().manual_seed(1)
    blocks = []
    for name in INTEGERS:
        fmt = FORMATS[name]
        weight = torch.randn(2, 37, 256, generator=generator)
        rounding = ColumnRounding.of(fmt, choose_grid(Ranges.of(weight, fmt), fmt), weight.shape)
        inputs = torch.randperm(256, generator=generator)[:100]
        left = weight[..., inputs].contiguous()
        values = left + 0.1 * torch.randn(left.shape, generator=generator)
        shares = 0.1 * torch.randn(2, 100, 100, generator=generator)
        blocks.append((rounding.at(inputs), [values, left, shares]))
    for name, (columns, tensors), (codes, errors) in zip(
        INTEGERS, blocks, run([asked(*case, monkeypatch) for case in blocks]), strict=True
    ):
        wanted, left = round_with_feedback(columns, *(tensor.clone() for tensor in tensors))
        assert (codes != wanted).float().mean() < 2e-3, name
        assert (errors - left).abs().median() < 1e-6, name


def test_numbers_of_vllms_kernel_follow_the_definition(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 21, 256, generator=generator)
    scales = (weight.abs().unflatten(-1, (2, 128)).amax(-1) / 7.5).bfloat16()
    inputs = torch.randperm(256, generator=generator)[:100]
    columns = VllmRounding.of(scales).at(inputs)
    left = weight[..., inputs].contiguous()
    # Shares of zero keep every sum exact; bounds themselves are values too.
    values = left.clone()
    values[0, 0], values[0, 1] = columns.bounds[0, 0, :, 7], columns.bounds[0, 1, :, 0]
    nothing, little = torch.zeros(100, 100), torch.randn(100, 100, generator=generator) * 0.1
    plain, passed_on = run(
        [asked(columns, [values, left, shares], monkeypatch) for shares in (nothing, little)]
    )
    codes, errors = round_with_feedback(columns, values.clone(), left.clone(), nothing)
    assert torch.equal(plain[0], codes)
    assert torch.equal(plain[1], errors)
    codes, errors = round_with_feedback(columns, values.clone(), left.clone(), little)
    assert (passed_on[0] != codes).float().mean() < 1e-3
    assert (passed_on[1] - errors).abs().median() < 1e-6


def test_rows_and_columns_that_fill_no_program(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, (values, left, shares) = block(FORMATS["w4a8"], 2)
    name, arguments = asked(columns, [values, left, shares], monkeypatch)
    scales = arguments[2]
    few = [(values[:, :r, :n], left[:, :r, :n], scales[:, :r, :n], shares[:n, :n]) for r, n in SIZES]
    calls = [
        (name, (*(t.contiguous() for t in (v, own)), s, None, None, given[None].contiguous(), -8, 7, False))
        for v, own, s, given in few
    ]
    whole = round_with_feedback(columns, values.clone(), left.clone(), shares)
    for (rows, n), (codes, errors) in zip(SIZES, run(calls), strict=True):
        assert torch.equal(codes, whole[0][:, :rows, :n])
        assert torch.equal(errors, whole[1][:, :rows, :n])


SIZES = [(0, 5), (1, 1), (16, 48), (17, 33), (37, 2)]


def test_formats_without_a_kernel_are_rounded_in_torch() -> None:
    columns, tensors = block(FORMATS["nvfp4"])
    assert column_feedback._on_gpu(columns, *tensors) is None


def test_fake_outputs_have_shape_and_dtype() -> None:
    with FakeTensorMode():
        values = torch.empty(2, 5, 48, device="meta")
        codes, errors = torch.ops.halfbyte.round_integers_with_feedback(
            values, values, values, None, None, values[:, :1], -8, 7, False
        )
    assert (codes.shape, codes.dtype) == (values.shape, torch.int8)
    assert (errors.shape, errors.dtype) == (values.shape, torch.float32)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values, shares = torch.zeros(2, 5, 8), torch.zeros(2, 8, 8)
    run = feedback.round_integers_with_feedback
    with pytest.raises(HalfbyteError, match="runs on a CUDA device, not on cpu"):
        run(values, values, values, None, None, shares, -8, 7, False)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    for left, wrong in ((values[:, :4], shares), (values.double(), shares), (values, shares[:, :4])):
        with pytest.raises(
            HalfbyteError, match=r"takes contiguous float32 .* \[1 or members, n, n\], not float"
        ):
            run(values, left, values, None, None, wrong, -8, 7, False)


@pytest.mark.parametrize("kind", ["integers", "numbers"])
@pytest.mark.parametrize("capability", [80, 90])
def test_nothing_spills_and_rows_are_stored_whole(
    kind: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)  # the CPU will do
    monkeypatch.setattr(feedback, "feedback_kernel", Recorder(feedback.feedback_kernel, launches))
    values, shares = torch.zeros(1, 64, 128), torch.zeros(1, 128, 128)
    if kind == "integers":
        feedback.round_integers_with_feedback(
            values, values, values, values, values[..., :1], shares, -8, 7, True
        )
    else:
        numbers, bounds = torch.zeros(1, 64, 128, 16), torch.zeros(1, 64, 128, 15)
        feedback.round_to_numbers_with_feedback(values, values, numbers, bounds, shares, -8)
    found = launches[0].compiled(capability)
    assert found.spills == 0
    assert "st.global.v4.b32" in found.asm["ptx"]  # errors, 16 bytes of a row at a time
