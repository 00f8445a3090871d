"""The portable GPU kernels against the float64 reference: every scheme that they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton.linear_cases import (
    LOSS,
    LOSS_ON_GPU,
    Case,
    assert_exact,
    assert_right,
    case_of,
    cut_off_on_hopper,
    hostile_weight,
    schemes,
    whole_case,
)
from tests.kernels.triton.linear_runners import Runner, interpreted, on_gpu


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Runner:
    return interpreted if request.param == "interpreter" else on_gpu


def check(run: Runner, cases: list[Case]) -> None:
    for case, y in zip(cases, run(cases), strict=True):
        assert_right(case, y, LOSS if run is interpreted else LOSS_ON_GPU)


def dtypes(plain: bool) -> tuple[torch.dtype, ...]:
    halves = (torch.bfloat16, torch.float16)
    return halves if plain else (*halves, torch.float32)


def test_every_scheme_follows_the_reference() -> None:
    cases, whole = [], []
    # Inputs and channels that fill no tile; spans that are cut short; sums in one part and in several.
    for number, (kernel, scheme, multiple) in enumerate(schemes()):
        inputs, fewer = (-(-count // multiple) * multiple for count in (1100 if number % 3 == 0 else 300, 40))
        choices = dtypes(scheme.activations is None)
        dtype, other = (choices[(number + turn) % len(choices)] for turn in range(2))
        cases.append(case_of(kernel, scheme, (5, 72, inputs), dtype, seed=number))
        whole.append(whole_case(kernel, scheme, (1, 17, fewer), other, bias=False, seed=number))
    results = interpreted([*cases, *whole])
    for case, y in zip(cases, results, strict=False):
        assert_right(case, y, LOSS)
    for case, y in zip(whole, results[len(cases) :], strict=True):
        assert_exact(case, y)


def test_hostile_scales_and_codes(run: Runner) -> None:
    cases = []
    for number, (kernel, scheme, multiple) in enumerate(schemes()):
        inputs = -(-200 // multiple) * multiple
        case = case_of(kernel, scheme, (3, 48, inputs), torch.bfloat16, bias=False, seed=number)
        x = case.x.clone()
        x[1] *= 0.01
        x[1, inputs // 2] = 448
        cases.append(replace(case, x=x, weight=hostile_weight(scheme, 48, inputs, number)))
    for case, y in zip(cases, run(cases), strict=True):
        fp8 = case.scheme.activations is not None and case.scheme.activations.element == "e4m3"
        assert_right(case, y, LOSS, cut_off_on_hopper(case) if fp8 and run is on_gpu else 0.0)


def test_many_tokens_in_one_call(run: Runner) -> None:
    # More token tiles than run together, the last of them ragged. (Inputs are quantized in few programs.)
    known = {scheme.name: (kernel, scheme) for kernel, scheme, _ in schemes()}
    names = ("w4a16", "w4a8-static", "w8a16", "fp8-static")
    check(run, [case_of(*known[name], (1100, 136, 256), torch.bfloat16) for name in names])


def test_no_tokens_give_none(run: Runner) -> None:
    cases = [case_of(kernel, scheme, (0, 24, 256), torch.bfloat16) for kernel, scheme, _ in schemes()]
    for case, y in zip(cases, run(cases), strict=True):
        assert (y.shape, y.dtype) == ((0, 24), torch.bfloat16), case.label


def test_bad_inputs_stay_in_their_row(run: Runner) -> None:
    clean = [
        # Spans that are cut short are followed by the next row.
        case_of(kernel, scheme, (6, 48, -(-200 // multiple) * multiple), torch.bfloat16, bias=False, seed=3)
        for kernel, scheme, multiple in schemes()
        # One scale for all inputs leaves bad ones out, and INT8 has no code for them.
        if scheme.activations is None or scheme.activations.granularity != "tensor"
    ]
    spoiled = []
    for case in clean:
        x = case.x.clone()
        x[1, 0], x[2, 150], x[4, -1] = torch.nan, torch.inf, -torch.inf
        spoiled.append(replace(case, x=x))
    results = run([*clean, *spoiled])
    for case, was, now in zip(clean, results[: len(clean)], results[len(clean) :], strict=True):
        assert not now[[1, 2, 4]].isfinite().all(1).any(), case.label
        others = [0, 3, 5]
        assert torch.equal(now[others], was[others]), case.label


def test_int8_sums_are_exact_at_the_extremes(run: Runner) -> None:
    (kernel, scheme, _), *_ = [
        entry for entry in schemes() if entry[0] == "triton-int8" and entry[1].activations is not None
    ]
    case = case_of(kernel, scheme, (2, 16, 1300), torch.float32, bias=False)
    codes = torch.full_like(case.weight.codes, -128)
    weight = replace(case.weight, codes=codes, scales=torch.ones_like(case.weight.scales))
    (y,) = run([replace(case, weight=weight, x=torch.full_like(case.x, 127.0))])
    assert y.unique().tolist() == [-128 * 127 * 1300]
