from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from halfbyte.algorithms.gptq import gptq
from halfbyte.algorithms.output_error import output_error
from halfbyte.algorithms.refit import refit_scales
from halfbyte.algorithms.rtn import rtn
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from tests.formats.hostile import FORMATS, bits, weights

REFITTED = [
    n for n, f in FORMATS.items() if f.granularity in ("channel", "group") and f.scale not in ("e8m0", "int8")
]
ALL = pytest.mark.parametrize("name", REFITTED)
SIZE = 128


def moment_of(size: int = SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * size, size, generator=generator) @ torch.randn(size, size, generator=generator)
    return inputs.T @ inputs / len(inputs)


def weight_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def cost(q: QuantizedTensor, weight: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """e M e^T of each row, float64."""
    error = weight.double() - dequantize(q)
    return ((error @ moment.double()) * error).sum(-1)


@ALL
@settings(max_examples=10, deadline=None)
@given(weight=weights())
def test_no_row_gets_worse_and_scales_stay_scales(name: str, weight: torch.Tensor) -> None:
    q, moment = rtn(weight, FORMATS[name]), moment_of()
    found = refit_scales(q, weight, moment)
    assert found.scales.dtype == q.scales.dtype
    assert ((found.scales.float() > 0) & found.scales.float().isfinite()).all()
    assert torch.equal(bits(found.codes), bits(q.codes))
    # Decoding rounds to fp32, fitting does not: rows that cancel almost wholly differ by that.
    size = ((weight.double() @ moment.double()) * weight.double()).sum(-1)
    assert (cost(found, weight, moment) <= cost(q, weight, moment) * (1 + 1e-6) + size * 1e-12).all()


@ALL
def test_outputs_get_better_even_after_gptq(name: str) -> None:
    weight, moment, fmt = weight_of(16, 256), moment_of(256), FORMATS[name]
    q = gptq(weight, fmt, moment).quantized
    errors = [output_error(weight, dequantize(x), moment) for x in (refit_scales(q, weight, moment), q)]
    # 8-bit codes are finer than a step of their bf16 scales.
    assert errors[0] < errors[1] if fmt.bits <= 4 or fmt.scale == "f32" else errors[0] <= errors[1]


def test_scales_converge_to_those_of_least_squares() -> None:
    """Against the normal equations of all groups of a row at once."""
    fmt, moment, weight = TensorFormat("int4", "group", 32, scale="f32"), moment_of(), weight_of(5, SIZE)
    q = rtn(weight, fmt)
    found = refit_scales(q, weight, moment, sweeps=300)
    for row in range(5):
        basis = torch.block_diag(*q.codes[row].double().view(4, 1, 32))
        normal, right = basis @ moment.double() @ basis.T, basis @ moment.double() @ weight[row].double()
        wanted = torch.linalg.solve(normal, right)
        assert (wanted > 0).all()
        torch.testing.assert_close(found.scales[row].double(), wanted, rtol=1e-5, atol=0)


def test_groups_of_no_weight_and_inputs_of_no_moment_keep_their_scales() -> None:
    weight, moment, fmt = weight_of(3, 256), moment_of(256), FORMATS["w4a8"]
    weight[1, :128] = 0.0
    moment[128:], moment[:, 128:] = 0.0, 0.0
    q = rtn(weight, fmt)
    found = refit_scales(q, weight, moment).scales
    assert torch.equal(found[1, 0], q.scales[1, 0])
    assert torch.equal(found[:, 1], q.scales[:, 1])
    assert not torch.equal(found[:, 0], q.scales[:, 0])


def test_a_moment_that_is_not_finite_changes_nothing() -> None:
    weight, fmt = weight_of(3, 256), FORMATS["w4a8"]
    q = rtn(weight, fmt)
    assert torch.equal(refit_scales(q, weight, torch.full((256, 256), torch.nan)).scales, q.scales)


def test_stacks_equal_their_members() -> None:
    weight, fmt = weight_of(2, 3, 256), FORMATS["w4a8"]
    moment, q = torch.stack([moment_of(256, 1), moment_of(256, 2)]), rtn(weight, fmt)
    own, shared = refit_scales(q, weight, moment), refit_scales(q, weight, moment[0])
    for i in range(2):
        alone = rtn(weight[i], fmt)
        assert torch.equal(own.scales[i], refit_scales(alone, weight[i], moment[i]).scales)
        assert torch.equal(shared.scales[i], refit_scales(alone, weight[i], moment[0]).scales)


@pytest.mark.parametrize("name", ["mxfp4", "w4a8-int8", "fp8_per_tensor", "fp8_per_block"])
def test_other_scales_are_refused(name: str) -> None:
    weight = weight_of(3, 128)
    with pytest.raises(HalfbyteError, match="cannot be refitted; accepted: per channel or group"):
        refit_scales(rtn(weight, FORMATS[name]), weight, moment_of())
