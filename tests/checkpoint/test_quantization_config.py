from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from halfbyte.checkpoint.quantization_config import find_config, parse_config, quantization_config
from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role, WeightSource
from halfbyte.schemes import PRESETS, Scheme
from tests.checkpoint import oracle

W4A8 = PRESETS["w4a8"]
W4A8_G64 = replace(W4A8, weights=W4A8.weights.with_group_size(64))
ROLES = {"gate": Role.ROUTER, "embed_tokens": Role.EMBEDDING, "lm_head": Role.LM_HEAD, "norm": Role.NORM}


def layout(*names: str, tied: bool = False) -> ModelLayout:
    modules = [
        ModuleInfo(
            name, ROLES.get(name.rpartition(".")[2], Role.LINEAR), 128, 128, WeightSource(f"{name}.weight")
        )
        for name in names
    ]
    return ModelLayout("llama", modules, tied, known=True)


def llama(layers: int = 2) -> list[str]:
    names = ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"]
    return [f"model.layers.{number}.{name}" for number in range(layers) for name in names]


def written(schemes: Mapping[str, Scheme | None], tied: bool = False) -> dict[str, Any]:
    """The config as it comes back from the file."""
    return json.loads(json.dumps(quantization_config(schemes, layout(*schemes, tied=tied))))


def test_one_scheme_targets_linear() -> None:
    schemes = dict.fromkeys(llama(), W4A8) | {"model.embed_tokens": None, "lm_head": None}
    assert written(schemes) == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 128,
                    "dynamic": False,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
                "output_activations": None,
            }
        },
        "kv_cache_scheme": None,
    }


def test_what_is_left_alone_is_ignored_by_name() -> None:
    schemes: dict[str, Scheme | None] = dict.fromkeys(llama(4), W4A8)
    schemes |= {f"model.layers.{n}.mlp.gate": None for n in range(4)}
    schemes |= {"model.layers.0.mlp.up_proj": None, "model.embed_tokens": None}
    assert written(schemes, tied=True)["ignore"] == [
        "model.layers.0.mlp.up_proj",
        r"re:.*\.mlp\.gate$",
        "lm_head",
    ]


def test_a_quantized_head_is_not_ignored() -> None:
    assert written(dict.fromkeys([*llama(), "lm_head"], W4A8))["ignore"] == []


def test_several_schemes_name_their_modules() -> None:
    schemes = {name: PRESETS["fp8"] if name.endswith("down_proj") else W4A8_G64 for name in llama()}
    config = written(schemes)
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [
        [r"re:.*\.self_attn\.q_proj$", r"re:.*\.self_attn\.k_proj$", r"re:.*\.mlp\.up_proj$"],
        [r"re:.*\.mlp\.down_proj$"],
    ]
    assert [group["format"] for group in config["config_groups"].values()] == [
        "pack-quantized",
        "float-quantized",
    ]
    assert len(oracle.validate(config).config_groups) == 2


def test_two_group_sizes_are_two_groups_of_one_format() -> None:
    schemes = {name: W4A8 if name.endswith("down_proj") else W4A8_G64 for name in llama()}
    config = written(schemes)
    assert config["format"] == "pack-quantized"
    assert len(config["config_groups"]) == 2


def test_a_recipe_with_two_level_weights_is_halfbytes_own() -> None:
    schemes = {name: PRESETS["w4a8-int8"] if "mlp" in name else PRESETS["fp8"] for name in llama()}
    config = written(schemes)
    assert config["quant_method"] == "halfbyte"
    assert [group["format"] for group in config["config_groups"].values()] == [
        "float-quantized",
        "two-level-pack-quantized",
    ]
    stored = parse_config(config)
    assert {name: stored.scheme_for(name) for name in schemes} == schemes


def test_the_target_is_in_the_file_and_of_w4a8_alone() -> None:
    names = llama()
    wide = PRESETS["w8a16"].aimed_at("vllm")
    schemes = {**dict.fromkeys(names, W4A8.aimed_at("vllm")), names[0]: wide}
    config = written(schemes)
    assert config["halfbyte_target"] == "vllm"
    oracle.validate(config)
    stored = parse_config(config)
    assert [stored.scheme_for(name) for name in names] == list(schemes.values())
    assert (wide.target, schemes[names[1]].target) == ("halfbyte", "vllm")
    assert "halfbyte_target" not in written(dict.fromkeys(names, W4A8))


def test_nothing_to_describe() -> None:
    with pytest.raises(HalfbyteError, match="no module is quantized"):
        written(dict.fromkeys(llama()))


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "w4a8-int8"])
def test_the_library_accepts_and_means_the_same(name: str) -> None:
    config = written(dict.fromkeys(llama(), PRESETS[name]))
    group = oracle.only_group(config)
    assert group.format == config["format"]
    assert parse_config(config).scheme_for(llama()[0]) == PRESETS[name]
    dumped = oracle.validate(config).model_dump(mode="json")
    assert parse_config(dumped).scheme_for(llama()[0]) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_their_names_through_the_file(name: str) -> None:
    scheme = PRESETS[name]
    if scheme.weights.is_integer and scheme.weights.group_size:
        scheme = replace(scheme, weights=scheme.weights.with_group_size(32))
    assert parse_config(written(dict.fromkeys(llama(), scheme))).scheme_for(llama()[0]) == scheme


def parsed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **top: Any) -> Scheme:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    found = parse_config({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **top})
    scheme = found.scheme_for("model.layers.0.mlp.up_proj")
    assert scheme is not None
    return scheme


FOUR = {"num_bits": 4, "type": "int", "symmetric": True}


@pytest.mark.parametrize(
    ("weights", "granularity", "group_size"),
    [
        ({**FOUR, "strategy": "channel", "group_size": None}, "channel", None),
        ({**FOUR, "strategy": "channel", "group_size": -1}, "channel", None),
        ({**FOUR, "group_size": -1}, "channel", None),
        ({**FOUR, "strategy": "group", "group_size": 128}, "group", 128),
        ({**FOUR, "group_size": 128}, "group", 128),
        ({**FOUR, "strategy": "GROUP", "group_size": 64}, "group", 64),
        ({**FOUR, "strategy": "tensor"}, "tensor", None),
        (FOUR, "tensor", None),
    ],
)
def test_variants_of_group_size(weights: dict[str, Any], granularity: str, group_size: int | None) -> None:
    fmt = parsed(weights).weights
    assert (fmt.granularity, fmt.group_size) == (granularity, group_size)


@pytest.mark.parametrize("actorder", [None, "weight", "static", "group", False])
def test_activation_order_changes_no_scheme(actorder: object) -> None:
    weights = {**FOUR, "strategy": "group", "group_size": 128, "actorder": actorder}
    assert parsed(weights) == PRESETS["w4a16"]


def test_names_of_other_schemes_say_what_they_are() -> None:
    weights = {**FOUR, "symmetric": False, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
    scheme = parsed(weights, inputs)
    assert scheme.name == "int4-channel-asym+int8-tensor-static"
    assert scheme.activations == ActivationFormat("int8", "tensor", dynamic=False)
    assert scheme.weights == TensorFormat("int4", "channel", symmetric=False)


def test_formats_of_old_and_new_files() -> None:
    e2m1 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    assert parsed(e2m1, format="mxfp4-pack-quantized") == PRESETS["mxfp4"]
    blocks = {"num_bits": 8, "type": "FLOAT", "strategy": "block", "block_structure": "128x128"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    assert parsed(blocks, inputs) == PRESETS["fp8_per_block"]
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    local = {**nvfp4, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
    assert parsed(nvfp4) == PRESETS["nvfp4"]
    assert parsed(nvfp4, local).activations == ActivationFormat("e2m1", "group", 16, scale="e4m3")


def test_everything_else_of_a_config() -> None:
    group = {"targets": ["Linear"], "weights": {**FOUR, "group_size": 128}, "output_activations": FOUR}
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": FOUR}
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    stored = parse_config(
        {
            "config_groups": {"a": group, "b": attention},
            "kv_cache_scheme": kv,
            "sparsity_config": {},
            "quantization_status": "frozen",
            "ignore": None,
            "format": "pack-quantized",
            "from_the_future": 1,
        }
    )
    assert stored.kv_cache == kv
    assert [group.format for group in stored.groups] == ["pack-quantized"]
    assert "output_activations are not applied" in stored.notes[0]
    assert "quantizes no weights" in stored.notes[1]


def ignoring(*ignore: str, targets: tuple[str, ...] = ("Linear",)) -> Any:
    group = {"targets": list(targets), "weights": {**FOUR, "group_size": 128}}
    return parse_config({"config_groups": {"g": group}, "ignore": list(ignore)}).scheme_for


def test_ignored_by_name_pattern_and_class() -> None:
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    assert ignoring()(q) == PRESETS["w4a16"]
    assert ignoring(k)(q) is not None
    assert ignoring(k)(k) is None
    assert ignoring("re:.*k_proj")(k) is None
    assert ignoring("re:.*k_proj")(q) is not None
    assert ignoring("re:vision_tower.*")("vision_tower.blocks.0.fc1") is None
    assert ignoring("Linear")(q) is None
    assert ignoring(k + ".linear")(k) is None
    assert ignoring("lm_head")("lm_head", Role.LM_HEAD) is None


def test_explicit_names_per_layer() -> None:
    names = [f"model.layers.{n}.mlp.down_proj" for n in range(3)]
    scheme_for = ignoring(targets=(*names[:2],))
    assert [scheme_for(name) is not None for name in names] == [True, True, False]


def test_exact_targets_before_patterns_before_classes() -> None:
    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {"num_bits": bits, "strategy": "channel"}}

    groups = {"a": group(8, "Linear"), "b": group(4, r"re:.*up_proj$"), "c": group(2, "layers.1.up_proj")}
    stored = parse_config({"config_groups": groups})
    bits = {
        name: scheme.weights.bits if (scheme := stored.scheme_for(name, role)) else None
        for name, role in {
            "layers.0.up_proj": Role.LINEAR,
            "layers.1.up_proj": Role.EXPERT,
            "layers.0.down_proj": Role.LINEAR,
            "layers.0.gate": Role.ROUTER,
            "embed_tokens": Role.EMBEDDING,
        }.items()
    }
    assert list(bits.values()) == [4, 2, 8, None, None]


def test_stored_tensors_have_the_last_word() -> None:
    scheme_for = ignoring()
    assert scheme_for("a", stored={"a.weight_packed", "a.weight_scale"}) is not None
    assert scheme_for("a", stored={"a.weight"}) is None


@pytest.mark.parametrize("config", [{"quantization_config": {"x": 1}}, {"compression_config": {"x": 1}}])
def test_where_the_entry_stands(config: dict[str, Any]) -> None:
    """Under its new or old name; early files wrapped it once more."""
    assert find_config(config) == {"x": 1}
    assert find_config({"text_config": config}) == {"x": 1}
    assert find_config({"compression_config": {"quantization_config": {"x": 1}}}) == {"x": 1}
    assert find_config({"quantization_config": None, "text_config": {}}) is None


BAD = {
    "no groups": ({"config_groups": None}, "config_groups must map"),
    "a preset's name": ({"config_groups": {"W4A16": ["Linear"]}}, "W4A16: a group must say targets"),
    "no targets": ({"config_groups": {"g": {"weights": FOUR}}}, "g: targets must be a list"),
    "ignore": ({"config_groups": {}, "ignore": "lm_head"}, "ignore must be a list"),
    "sparse": (
        {"config_groups": {}, "sparsity_config": {"format": "sparse-24-bitmask"}},
        "'sparse-24-bitmask'",
    ),
    "target": (
        {"config_groups": {}, "halfbyte_target": "sglang"},
        "halfbyte_target 'sglang'; accepted: halfbyte, vllm",
    ),
    "method": ({"quant_method": "awq"}, "quant_method 'awq'"),
}


@pytest.mark.parametrize(("config", "message"), BAD.values(), ids=BAD)
def test_configs_that_cannot_be_read(config: dict[str, Any], message: str) -> None:
    with pytest.raises(HalfbyteError, match=message):
        parse_config(config)


@pytest.mark.parametrize(
    ("weights", "inputs", "top", "message"),
    [
        ({**FOUR, "num_bits": 1}, None, {}, "element 'int1' is not known"),
        ({**FOUR, "num_bits": "4"}, None, {}, "num_bits '4'"),
        ({**FOUR, "type": "float", "num_bits": 6}, None, {}, "6-bit float weights"),
        ({**FOUR, "strategy": "spiral"}, None, {}, "granularity 'spiral' is not known"),
        ({**FOUR, "group_size": "128"}, None, {}, "group_size '128'"),
        ({**FOUR, "strategy": "group"}, None, {}, "group size None"),
        ({**FOUR, "strategy": "block", "block_structure": [128]}, None, {}, r"block_structure \[128\]"),
        (FOUR, {"num_bits": 8, "symmetric": False, "dynamic": True}, {}, "asymmetric input activations"),
        (FOUR, None, {"format": "marlin-24"}, "format 'marlin-24' is not readable"),
    ],
)
def test_values_that_no_format_has(
    weights: dict[str, Any], inputs: dict[str, Any] | None, top: dict[str, Any], message: str
) -> None:
    with pytest.raises(HalfbyteError, match=message) as caught:
        parsed(weights, inputs, **top)
    assert "group_0" in str(caught.value)


def test_weights_that_the_config_calls_dense() -> None:
    stored = parse_config(
        {"config_groups": {"g": {"targets": ["Linear"], "weights": FOUR}}, "format": "dense"}
    )
    assert stored.groups == ()
    assert "not quantized" in stored.notes[0]
