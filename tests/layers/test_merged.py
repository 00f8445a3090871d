from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.kernels.quantized_inputs import sum_group
from halfbyte.kernels.registry import forced_kernel
from halfbyte.layers.linear import QuantLinear
from halfbyte.layers.merged import MergedLinear, MergedPlain, cannot_merge
from halfbyte.schemes import PRESETS, Scheme
from tests.kernels import sharing
from tests.layers.plain_codec import quant_linear

SIZES = (64, 32, 16)
COLUMNS = 256


def settled(name: str, **changes: object) -> Scheme:
    scheme = PRESETS[name]
    return replace(scheme, weights=replace(scheme.weights.with_scale("bf16"), **changes))


def weights(sizes: tuple[int, ...] = SIZES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, COLUMNS, generator=generator) for rows in sizes]


def layers(scheme: Scheme, dtype: torch.dtype = torch.float32, biases: str = "...") -> list[QuantLinear]:
    """biases: a ``b`` for each layer that has one."""
    made = []
    for weight, has in zip(weights(), biases, strict=True):
        bias = torch.randn(len(weight), dtype=dtype) if has == "b" else None
        made.append(quant_linear(scheme, weight, bias, dtype)[0])
    return made


def inputs(rows: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)


BLOCKS = Scheme(
    "blocks",
    TensorFormat("e4m3", "block", block_shape=(16, 128), scale="f32"),
    ActivationFormat("e4m3", "group", 128),
)


@pytest.mark.parametrize("biases", ["...", "bbb", ".b."])
@pytest.mark.parametrize(
    "scheme",
    [settled("w4a8"), settled("w4a16-asym"), settled("fp8"), PRESETS["w4a8-int8"], settled("mxfp4"), BLOCKS],
    ids=lambda scheme: scheme.name,
)
def test_it_is_its_parts_one_after_the_other(scheme: Scheme, biases: str) -> None:
    parts, x = layers(scheme, biases=biases), inputs()
    want = torch.cat([part(x) for part in parts], dim=-1)
    states = [part.state_dict() for part in parts]
    assert cannot_merge(parts) == ""
    merged = MergedLinear(parts, "model.merged")
    torch.testing.assert_close(merged(x), want)
    assert (merged.in_features, merged.out_features) == (COLUMNS, sum(SIZES))
    for part, rows, state in zip(parts, merged(x).split(SIZES, dim=-1), states, strict=True):
        torch.testing.assert_close(part(x), rows)
        assert part.kernel == merged.kernel
        saved = part.state_dict()
        assert list(saved) == list(state)
        assert all(torch.equal(saved[name].float(), state[name].float()) for name in state)


def test_it_has_no_state_of_its_own() -> None:
    model = nn.Module()
    model.parts = nn.ModuleList(layers(settled("w4a8"), biases="bbb"))
    before = list(model.state_dict())
    model.merged = MergedLinear(list(model.parts), "model.merged")
    assert list(model.state_dict()) == before
    assert not any(part.packed_tensors() for part in model.parts)
    assert list(model.merged.packed_tensors())


def test_it_follows_its_inputs_and_so_do_its_parts() -> None:
    parts = layers(settled("w4a8"))
    merged = MergedLinear(parts, "model.merged")
    x = inputs(dtype=torch.bfloat16)
    assert merged(x).dtype == torch.bfloat16
    assert merged.kernel == parts[0].kernel == "cpu-int4"
    want = torch.cat([dequantize(part.unpack()) for part in layers(settled("w4a8"))])
    assert torch.equal(dequantize(merged.unpack()), want)
    assert torch.equal(torch.cat([dequantize(part.unpack()) for part in parts]), want)


def test_parts_answer_for_themselves_after_the_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing.install(monkeypatch)
    parts, x = layers(settled("w4a8"), biases="b.b"), inputs(3)
    before = [(part.problem, part.static_input_scale, part(x)) for part in parts]
    MergedLinear(parts, "model.merged")
    for part, (problem, scale, want) in zip(parts, before, strict=True):
        assert (part.problem, part.static_input_scale) == (problem, scale)
        assert part.takes_quantized(x)
        torch.testing.assert_close(part.forward_quantized(part.quantize(x), x.dtype), want)


def test_it_runs_on_the_kernel_of_its_parts() -> None:
    with forced_kernel("reference"):
        parts = layers(settled("w4a8"))
    assert MergedLinear(parts, "model.merged").kernel == "reference"


def test_copies_stand_alone() -> None:
    holder = nn.ModuleList(layers(settled("w4a8")))
    holder.append(MergedLinear(list(holder), "model.merged"))
    other = copy.deepcopy(holder)
    assert torch.equal(other[1](inputs()), holder[1](inputs()))
    assert other[1]._borrower[0] is other[3]


def test_quantized_inputs_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = sharing.install(monkeypatch)
    parts, x = layers(settled("w4a8"), biases="bb."), inputs(3)
    want = torch.cat([part(x) for part in parts], dim=-1)
    merged = MergedLinear(parts, "model.merged")
    assert merged.takes_quantized(x)
    shared = merged.quantize(x)
    assert shared.sums.shape == (3, COLUMNS // sum_group(merged.scheme))
    torch.testing.assert_close(merged.forward_quantized(shared, torch.float32), want)
    assert kernel.calls == [(3, COLUMNS)]
    halved = merged.forward_quantized(shared, torch.float16)
    torch.testing.assert_close(halved, want.half(), rtol=1e-3, atol=1e-3)


def test_a_kernel_that_quantizes_itself_says_so() -> None:
    layer, x = layers(settled("w4a8"))[0], inputs()
    assert not layer.takes_quantized(x)
    with pytest.raises(HalfbyteError, match=r"^model.proj: kernel dequantize quantizes its inputs itself$"):
        layer.quantize(x)


def test_layers_without_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [nn.Linear(COLUMNS, rows, bias=rows > 16) for rows in SIZES]
    x = inputs()
    want = torch.cat([part(x) for part in parts], dim=-1)
    states = [{name: tensor.clone() for name, tensor in part.state_dict().items()} for part in parts]
    assert cannot_merge(parts) == ""
    merged = MergedPlain(parts)
    torch.testing.assert_close(merged(x), want)
    assert (merged.in_features, merged.out_features) == (COLUMNS, sum(SIZES))
    assert not merged.state_dict()
    for part, state in zip(parts, states, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in part.state_dict().items())
        assert part.weight.untyped_storage().data_ptr() == merged.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (lambda: [*layers(settled("w4a8")), nn.Linear(COLUMNS, 8)], "some of them are quantized and some"),
        (lambda: [*layers(settled("w4a8")), *layers(settled("w4a16"))], "their schemes or inputs differ"),
        (
            lambda: [*layers(settled("w4a16")), *layers(settled("w4a16", group_size=64))],
            "their schemes or inputs differ",
        ),
        (lambda: layers(settled("fp8_per_tensor")), "each has one scale for its whole weight"),
        (lambda: layers(settled("nvfp4")), "each has one scale for its whole weight"),
        (
            lambda: layers(replace(BLOCKS, weights=replace(BLOCKS.weights, block_shape=(64, 128)))),
            "their blocks would overlap",
        ),
    ],
)
def test_what_cannot_be_merged(parts, reason: str) -> None:
    assert cannot_merge(parts()).startswith(reason)


def test_inputs_with_scales_of_their_own() -> None:
    scheme = Scheme(
        "fp8-static",
        TensorFormat("e4m3", "channel", scale="bf16"),
        ActivationFormat("e4m3", "tensor", dynamic=False),
    )
    made = [
        quant_linear(scheme, weight, None, torch.float32, input_scale=torch.tensor([0.02]))[0]
        for weight in weights()
    ]
    assert cannot_merge(made) == "their inputs have scales of their own"


def test_a_kernel_that_cannot_run_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = sharing.install(monkeypatch)
    parts = layers(settled("w4a8"))
    monkeypatch.setattr(
        kernel, "can_implement", lambda problem: (problem.out_features <= 64, "at most 64 rows")
    )
    assert cannot_merge(parts) == "at most 64 rows"
