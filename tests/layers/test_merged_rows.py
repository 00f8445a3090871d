"""Merged layers follow the parameters of their parts, wherever those go."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from halfbyte.layers.merged import MergedLinear, MergedPlain, cannot_merge
from halfbyte.schemes import PRESETS
from tests.layers.plain_codec import quant_linear

SIZES = (6, 4, 2)
IN = 8


class Merged(nn.Module):
    def __init__(self, biases: str = "bbb") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ModuleList(
            nn.Linear(IN, size, bias=has == "b") for size, has in zip(SIZES, biases, strict=True)
        )
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)
        self.merged = MergedPlain(list(self.parts))

    def is_right(self) -> bool:
        x = torch.randn(3, IN, generator=torch.Generator().manual_seed(1)).to(self.parts[0].weight)
        return torch.allclose(self.merged(x), torch.cat([part(x) for part in self.parts], dim=-1))

    def is_stored_once(self) -> bool:
        places = {part.weight.untyped_storage().data_ptr() for part in self.parts}
        return places == {self.merged.weight.untyped_storage().data_ptr()}


def other() -> Merged:
    model = Merged()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def edited(model: Merged) -> Merged:
    with torch.no_grad():
        model.parts[1].bias.add_(1)
        model.parts[2].weight.add_(1)
    return model


def loaded(model: Merged, **options: bool) -> Merged:
    model.load_state_dict(other().state_dict(), **options)
    return model


def replaced(model: Merged) -> Merged:
    model.parts[0].weight = nn.Parameter(torch.ones(SIZES[0], IN))
    model.parts[1].bias = None
    return model


@pytest.mark.parametrize(
    "change",
    [
        edited,
        loaded,
        lambda model: loaded(model, assign=True),
        replaced,
        lambda model: model.double(),
        lambda model: edited(model.double().float()),
        lambda model: edited(copy.deepcopy(model)),
        lambda model: loaded(pickle.loads(pickle.dumps(model))),
        lambda model: loaded(model.to("meta").to_empty(device="cpu")),
    ],
    ids=["edited", "loaded", "assigned", "replaced", "double", "and back", "copied", "pickled", "emptied"],
)
def test_it_follows(change: Callable[[Merged], Merged]) -> None:
    model = change(Merged())
    assert model.is_right()
    assert model.is_stored_once()


def test_a_bias_that_comes_and_goes() -> None:
    model = Merged("b..")
    assert model.is_right()
    model.parts[1].bias = nn.Parameter(torch.ones(SIZES[1]))
    assert model.is_right()
    model.parts[0].bias = model.parts[1].bias = None
    assert model.is_right()
    assert model.merged.bias is None


def test_parameters_stay_the_objects_that_optimizers_know() -> None:
    parts = [nn.Linear(IN, size) for size in SIZES]
    before = [id(parameter) for part in parts for parameter in part.parameters()]
    MergedPlain(parts)
    assert [id(parameter) for part in parts for parameter in part.parameters()] == before


def test_what_has_moved_leaves_nothing_behind() -> None:
    model = Merged()
    model.double()
    assert model.merged._weights._merged is None
    rows = model.merged.weight
    model.to("cpu")
    assert model.merged.weight is rows


def test_inference_mode_leaves_no_trace() -> None:
    model = Merged()
    model.double()
    with torch.inference_mode():
        assert model.is_right()
    assert not model.merged.weight.is_inference()
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_a_merged_layer_has_no_parameters() -> None:
    assert not list(Merged().merged.parameters())
    parts = [quant_linear(PRESETS["w4a8-int8"], torch.randn(64, 256), torch.ones(64))[0] for _ in range(2)]
    merged = MergedLinear(parts, "model.merged")
    assert not list(merged.parameters())
    assert "bias=True" in repr(merged)


def test_biases_of_quantized_layers_may_be_edited() -> None:
    dtype, x = torch.float32, torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    parts = [
        quant_linear(PRESETS["w4a8-int8"], torch.randn(64, 256), torch.ones(64), dtype)[0] for _ in range(2)
    ]
    merged = MergedLinear(parts, "model.merged")
    before = merged(x)
    with torch.no_grad():
        parts[1].bias.add_(5)
    want = before + torch.cat([torch.zeros(64), torch.full((64,), 5.0)])
    torch.testing.assert_close(merged(x), want)
    parts[1].bias = nn.Parameter(torch.ones(64))
    torch.testing.assert_close(merged(x), before)


def test_parts_of_different_dtypes() -> None:
    parts = [nn.Linear(IN, 4), nn.Linear(IN, 4).double()]
    assert cannot_merge(parts) == "their weights or biases differ in dtype or device"
