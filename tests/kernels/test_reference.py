from __future__ import annotations

import pytest
import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.reference import exact_weight, reference_linear


def test_a_two_by_two_layer_by_hand() -> None:
    fmt = TensorFormat("int4", "group", 2, scale="f32")
    q = QuantizedTensor(fmt, torch.tensor([[1, -2], [7, 0]], dtype=torch.int8), torch.tensor([[0.5], [2.0]]))
    y = reference_linear(torch.tensor([[3.0, 1.0]]), q, bias=torch.tensor([10.0, -1.0]))
    assert y.tolist() == [[0.5 * (3 - 2) + 10, 2.0 * 21 - 1]]
    assert y.dtype == torch.float64


def test_zero_points_and_both_scales_count() -> None:
    fmt = TensorFormat("int4", "group", 2, symmetric=False, scale="int8", outer="channel")
    q = QuantizedTensor(
        fmt,
        torch.tensor([[3, -8, 0, 1]], dtype=torch.int8),
        torch.tensor([[2, 5]], dtype=torch.int8),
        torch.tensor([[1, -1]], dtype=torch.int8),
        torch.tensor([[0.25]]),
    )
    assert exact_weight(q).tolist() == [[1.0, -4.5, 1.25, 2.5]]


def test_inputs_are_quantized_per_token() -> None:
    # 448 sets the scale to 1; 17 lies between the E4M3 neighbours 16 and 18, and its tie goes to the even 16.
    fmt = TensorFormat("int8", "channel", scale="f32")
    q = QuantizedTensor(fmt, torch.ones(1, 2, dtype=torch.int8), torch.ones(1, 1))
    x = torch.tensor([[448.0, 17.0], [44.8, 1.7]])
    y = reference_linear(x, q, ActivationFormat("e4m3", "token"))
    assert y[0].item() == 464
    assert y[1].item() == pytest.approx(46.4, rel=1e-6)


def test_static_scale_is_used_as_it_is() -> None:
    fmt = TensorFormat("int8", "channel", scale="f32")
    q = QuantizedTensor(fmt, torch.ones(1, 1, dtype=torch.int8), torch.ones(1, 1))
    static = ActivationFormat("int8", "tensor", dynamic=False)
    y = reference_linear(torch.tensor([[0.7]]), q, static, input_scale=torch.tensor([0.5]))
    assert y.tolist() == [[0.5]]
