from __future__ import annotations

import pytest
import torch

from halfbyte.algorithms import output_error as module
from halfbyte.algorithms.output_error import output_error


def case(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, its inputs ``[..., tokens, in]``, and another weight."""
    seed = torch.Generator().manual_seed(0)
    *lead, _, size = shape
    weight, inputs = torch.randn(shape, generator=seed), torch.randn(*lead, 50, size, generator=seed)
    return weight, inputs, weight + torch.randn(shape, generator=seed) * 0.1


def of_outputs(weight: torch.Tensor, inputs: torch.Tensor, decoded: torch.Tensor) -> float:
    """From the outputs themselves."""
    weight, inputs, decoded = weight.double(), inputs.double(), decoded.double()
    outputs = inputs @ weight.mT
    return float((inputs @ decoded.mT - outputs).norm() / outputs.norm())


@pytest.mark.parametrize("shape", [(7, 12), (3, 7, 12), (2, 2, 5, 12)])
@pytest.mark.parametrize("slab", [1, 40, 1 << 24])
def test_it_is_the_error_of_the_outputs(
    shape: tuple[int, ...], slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLAB", slab)
    weight, inputs, decoded = case(*shape)
    moment = inputs.mT @ inputs / inputs.shape[-2]
    assert output_error(weight, decoded, moment) == pytest.approx(
        of_outputs(weight, inputs, decoded), rel=1e-5
    )


def test_members_may_share_a_moment() -> None:
    weight, inputs, decoded = case(3, 7, 12)
    found = output_error(weight, decoded, inputs[0].T @ inputs[0])
    assert found == pytest.approx(of_outputs(weight, inputs[0], decoded), rel=1e-5)


def test_nothing_in_nothing_out() -> None:
    weight, inputs, decoded = case(4, 6)
    assert output_error(weight, decoded, torch.zeros(6, 6)) == 0.0
    assert output_error(torch.zeros(4, 6), decoded, inputs.T @ inputs) == 0.0
    assert output_error(weight, weight, inputs.T @ inputs) == 0.0


def test_large_and_small_weights() -> None:
    weight, inputs, decoded = case(4, 6)
    moment = inputs.T @ inputs
    wanted = pytest.approx(output_error(weight, decoded, moment), rel=1e-4)
    assert output_error(weight * 1e30, decoded * 1e30, moment) == wanted
    assert output_error(weight * 1e-30, decoded * 1e-30, moment) == wanted
