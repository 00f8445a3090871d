from __future__ import annotations

import pytest
import torch

from halfbyte.algorithms.hadamard import random_hadamard
from halfbyte.algorithms.rotation import fold_gain, rotate_bias, rotate_inputs, rotate_outputs
from halfbyte.errors import HalfbyteError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rms_norm(x: torch.Tensor, gain: torch.Tensor | float) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * gain


def test_a_rotated_residual_stream_puts_out_the_same() -> None:
    embedding, bias, reader = normal(10, 24), normal(24, seed=1), normal(8, 24, seed=2)
    writer, gain = normal(24, 24, seed=3), normal(24, seed=4)
    rotation = random_hadamard(24, 5)
    stream = embedding @ writer.t() + bias + embedding
    expected = rms_norm(stream, gain) @ reader.t()
    # The writer reads the embedding itself, so both of its sides turn.
    turned = rotate_inputs(embedding, rotation)
    writer = rotate_outputs(rotate_inputs(writer, rotation), rotation)
    stream = turned @ writer.t() + rotate_bias(bias, rotation) + turned
    reader = rotate_inputs(fold_gain(reader, gain), rotation)
    torch.testing.assert_close(rms_norm(stream, 1.0) @ reader.t(), expected, rtol=1e-4, atol=1e-4)


def test_heads_turn_alone_and_shared_ones_with_their_readers() -> None:
    """Two value heads of four channels, each read by three query heads."""
    tokens, value, bias, output = (
        normal(5, 16),
        normal(8, 16, seed=1),
        normal(8, seed=2),
        normal(16, 24, seed=3),
    )
    rotation = random_hadamard(4, 0)

    def attend(v: torch.Tensor, b: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        heads = (tokens @ v.t() + b).view(5, 2, 1, 4).expand(-1, -1, 3, -1)
        return heads.reshape(5, 24) @ o.t()

    turned = rotate_outputs(value, rotation), rotate_bias(bias, rotation), rotate_inputs(output, rotation)
    torch.testing.assert_close(attend(*turned), attend(value, bias, output), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(turned[0], value)


def test_products_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.algorithms.rotation._ROWS", 3)
    weight, rotation = normal(7, 12).bfloat16(), random_hadamard(12, 1)
    assert torch.equal(rotate_inputs(weight, rotation), (weight.double() @ rotation).float())
    assert torch.equal(rotate_outputs(weight.t(), rotation), (rotation.t() @ weight.double().t()).float())


@pytest.mark.parametrize("rotation", [torch.eye(5), torch.ones(4, 2), torch.ones(4)])
def test_rotations_that_do_not_fit_are_refused(rotation: torch.Tensor) -> None:
    with pytest.raises(HalfbyteError, match="does not fit"):
        rotate_inputs(torch.ones(3, 8), rotation)
