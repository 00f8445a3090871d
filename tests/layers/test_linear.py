from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import quantize
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.reference import reference_linear
from halfbyte.kernels.registry import forced_kernel
from halfbyte.layers.linear import QuantLinear
from halfbyte.schemes import PRESETS, Scheme
from tests.layers.plain_codec import PlainCodec, quant_linear

W4A8 = replace(PRESETS["w4a8"], weights=PRESETS["w4a8"].weights.with_scale("bf16"))


def weight(rows: int = 64, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 0, 3)])
def test_any_leading_axes(lead: tuple[int, ...]) -> None:
    bias = torch.arange(64.0).bfloat16()
    layer, q = quant_linear(W4A8, weight(), bias)
    x = torch.randn(*lead, 256).bfloat16()
    y = layer(x)
    assert (y.shape, y.dtype) == ((*lead, 64), torch.bfloat16)
    want = reference_linear(x.reshape(-1, 256), q, W4A8.activations, bias=bias)
    torch.testing.assert_close(y.reshape(-1, 64).double(), want, rtol=2**-8, atol=1e-3)


def test_it_keeps_only_the_kernels_form_and_gives_back_the_stored_one() -> None:
    layer, q = quant_linear(W4A8, weight())
    assert layer.kernel == "cpu-int4"
    assert not list(layer.buffers())
    state = layer.state_dict()
    assert list(state) == ["weight", "weight_scale", "weight_shape"]
    assert torch.equal(state["weight"], q.codes)
    assert torch.equal(state["weight_scale"], q.scales)
    # The codec above writes zeros here: small tensors come back as they were read.
    assert state["weight_shape"].tolist() == [64, 256]


def test_before_repacking_the_stored_tensors_are_its_state_and_it_does_not_run() -> None:
    stored = {"weight": torch.empty(4, 128, dtype=torch.int8, device="meta")}
    layer = QuantLinear(W4A8, 128, 4, stored=stored, codec=PlainCodec(W4A8.weights), name="model.proj")
    assert {name: t.dtype for name, t in layer.state_dict().items()} == {"weight": torch.int8}
    with pytest.raises(HalfbyteError, match=r"^model.proj: its weight was not loaded"):
        layer(torch.zeros(1, 128))


def test_it_follows_the_dtype_of_its_inputs() -> None:
    layer, q = quant_linear(W4A8, weight())
    x = torch.randn(7, 256)
    y = layer(x)
    assert (y.dtype, layer.kernel) == (torch.float32, "dequantize")
    torch.testing.assert_close(y.double(), reference_linear(x, q, W4A8.activations), rtol=1e-5, atol=1e-4)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer.kernel == "cpu-int4"
    assert torch.equal(layer.state_dict()["weight"], q.codes)


def test_casting_the_module_leaves_the_weight_alone() -> None:
    layer, q = quant_linear(W4A8, weight(), torch.zeros(64, dtype=torch.bfloat16))
    layer.to(torch.float16)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.float16
    assert torch.equal(layer.state_dict()["weight_scale"], q.scales)


def test_static_input_scales() -> None:
    scheme = Scheme(
        "fp8-static",
        TensorFormat("e4m3", "tensor", scale="f32"),
        ActivationFormat("e4m3", "tensor", dynamic=False),
    )
    scale = torch.tensor([0.02])
    layer, q = quant_linear(scheme, weight(), input_scale=scale)
    x = torch.randn(3, 256)
    want = reference_linear(x, q, scheme.activations, input_scale=scale)
    torch.testing.assert_close(layer(x).double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(layer.state_dict()["input_scale"], scale)


def test_a_forced_kernel_that_cannot_run_it_names_the_layer() -> None:
    with (
        pytest.raises(HalfbyteError, match=r"^model.proj: no kernel can run it; cpu-int8: "),
        forced_kernel("cpu-int8"),
    ):
        quant_linear(W4A8, weight())


def test_a_weight_of_another_shape_is_refused() -> None:
    q = quantize(weight(), W4A8.weights)
    stored = {"weight": q.codes, "weight_scale": q.scales}
    layer = QuantLinear(W4A8, 256, 32, stored=stored, codec=PlainCodec(W4A8.weights), name="model.proj")
    with pytest.raises(HalfbyteError, match=r"shape \[64, 256\], but the model has \[32, 256\]"):
        layer.repack(torch.bfloat16)


def test_gradients_stop_with_an_error_not_silently() -> None:
    layer, _ = quant_linear(W4A8, weight())
    x = torch.randn(2, 256, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    with pytest.raises(HalfbyteError, match="forward only"):
        y.sum().backward()


def test_copies_run_alike() -> None:
    layer, _ = quant_linear(W4A8, weight())
    x = torch.randn(2, 256).bfloat16()
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_repr_says_what_runs() -> None:
    assert "scheme=w4a8, kernel=cpu-int4" in repr(quant_linear(W4A8, weight())[0])
