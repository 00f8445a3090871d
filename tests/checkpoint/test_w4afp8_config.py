from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.checkpoint.quantization_config import parse_config
from halfbyte.checkpoint.w4afp8_config import (
    dense_scheme,
    experts_scheme,
    is_experts,
    moved_input_scales,
    output_config,
)
from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import ActivationFormat
from halfbyte.models.layout import Role

MIXTURE = "model.layers.1.mlp.experts"


def test_what_is_written_is_read() -> None:
    config = output_config({"architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16"})
    assert config["quantization_config"]["quant_method"] == "w4afp8"
    assert config["torch_dtype"] == "bfloat16"
    stored = parse_config(config["quantization_config"])
    assert (stored.form, stored.scale_leaf) == ("w4afp8", "weight_scale_inv")
    assert stored == parse_config({"quant_method": "w4afp8"})


@pytest.mark.parametrize(
    ("name", "role", "experts"),
    [
        (f"{MIXTURE}.0.gate_proj", Role.EXPERT, True),
        ("model.layers.1.block_sparse_moe.experts.17.w2", Role.EXPERT, True),
        ("model.layers.1.mlp.shared_experts.gate_proj", Role.LINEAR, False),
        ("model.layers.0.mlp.gate_proj", Role.LINEAR, False),
        ("model.layers.0.self_attn.kv_b_proj", Role.LINEAR, False),
    ],
)
def test_experts_and_the_rest(name: str, role: Role, experts: bool) -> None:
    stored = parse_config({"quant_method": "w4afp8"})
    assert stored.scheme_for(name, role) == (experts_scheme() if experts else dense_scheme())
    assert stored.scheme_for(name, role, stored={f"{name}.weight"}) is None
    assert is_experts(experts_scheme())
    assert not is_experts(dense_scheme())


def test_numbers_of_both() -> None:
    experts, dense = experts_scheme(), dense_scheme()
    assert (experts.weights.element, experts.weights.group_size, experts.weights.symmetric) == (
        "int4",
        128,
        True,
    )
    assert experts.activations == ActivationFormat("e4m3", "tensor", dynamic=False)
    assert (dense.weights.element, dense.weights.block_shape) == ("e4m3", (128, 128))
    assert dense.activations == ActivationFormat("e4m3", "group", 128)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", 64),
        ("group_size", True),
        ("group_size", 128.0),
        ("weight_block_size", [64, 64]),
        ("weight_block_size", None),
        ("activation_scheme", "static"),
        ("moe_activation_scheme", "dynamic"),
        ("moe_weight_format", "mxfp4"),
        ("linear_weight_format", "bf16"),
    ],
)
def test_numbers_of_another_form(key: str, value: object) -> None:
    entry = {"quant_method": "w4afp8", key: value}
    if value is None:  # as if it was not there
        assert parse_config(entry).form == "w4afp8"
        return
    with pytest.raises(HalfbyteError, match=f"{key} .*; accepted with quant_method w4afp8: "):
        parse_config(entry)


@given(
    st.dictionaries(
        st.sampled_from(["group_size", "weight_block_size", "moe_weight_format"]), st.from_type(object)
    )
)
def test_any_entry_is_read_or_refused(said: dict[str, object]) -> None:
    with contextlib.suppress(HalfbyteError):
        assert parse_config({"quant_method": "w4afp8", **said}).form == "w4afp8"


def test_input_scales_that_are_named_after_shards() -> None:
    weights = [
        f"{MIXTURE}.{index}.{name}.weight"
        for index in (0, 1)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    scales = [f"{MIXTURE}.{index}.{shard}.input_scale" for index in (0, 1) for shard in ("w1", "w3", "w2")]
    found = moved_input_scales([*weights, *scales])
    assert list(found) == scales
    assert [found[name] for name in scales[:3]] == [
        f"{MIXTURE}.0.{name}.input_scale" for name in ("gate_proj", "up_proj", "down_proj")
    ]


def test_input_scales_that_stay() -> None:
    beside = [f"{MIXTURE}.0.w1.weight", f"{MIXTURE}.0.w1.input_scale"]
    nowhere = [f"{MIXTURE}.0.w1.input_scale"]
    twice = [
        f"{MIXTURE}.0.{name}" for name in ("w1.input_scale", "gate_proj.weight", "gate_proj.input_scale")
    ]
    for names in (beside, nowhere, twice):
        assert moved_input_scales(names) == {}
