from __future__ import annotations

import pytest

from halfbyte.checkpoint.qserve_config import output_config, scheme_of
from halfbyte.checkpoint.quantization_config import parse_config
from halfbyte.errors import HalfbyteError
from halfbyte.schemes import PRESETS


@pytest.mark.parametrize(("size", "granularity"), [(128, "group"), (-1, "channel")])
def test_both_kinds_survive_config_json(size: int, granularity: str) -> None:
    scheme = scheme_of(size)
    config = output_config(
        {"architectures": ["LlamaForCausalLM"]}, {"a": scheme, "b": scheme, "lm_head": None}
    )
    # The entry and the dtype that SGLang's pull request 6521 asks for, to the letter.
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "qoq", "wbits": 4, "group_size": size},
    }
    stored = parse_config(config["quantization_config"])
    assert (stored.quant_method, stored.form, stored.scale_leaf) == ("qoq", "qserve", "s1_scales")
    assert stored.scheme_for("a") == scheme
    assert scheme.weights.granularity == granularity
    assert (scheme.label, scheme.activations) == ("W4A8", PRESETS["w4a8-int8"].activations)


def test_both_names_of_the_dtype_agree() -> None:
    config = output_config({"dtype": "bfloat16"}, {"a": scheme_of(-1)})
    assert (config["dtype"], config["torch_dtype"]) == ("float16", "float16")


def test_only_what_is_stored_is_quantized() -> None:
    stored = parse_config({"quant_method": "qoq", "wbits": 4, "group_size": -1})
    assert stored.scheme_for("a", stored={"a.s1_scales"}) == scheme_of(-1)
    assert stored.scheme_for("b", stored={"a.s1_scales", "b.weight"}) is None


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"wbits": 8}, ["wbits 8", "4"]),
        ({"wbits": None}, ["wbits None"]),
        ({"group_size": 64}, ["group_size 64", "128", "-1"]),
        ({"group_size": "128"}, ["group_size '128'"]),
        ({"group_size": True}, ["group_size True"]),
    ],
)
def test_what_is_not_of_this_form(said: dict[str, object], words: list[str]) -> None:
    with pytest.raises(HalfbyteError) as caught:
        parse_config({"quant_method": "qoq", "wbits": 4, "group_size": 128, **said})
    assert all(word in str(caught.value) for word in words)


def test_one_scheme_for_all() -> None:
    for schemes in ({"a": scheme_of(128), "b": scheme_of(-1)}, {"a": None}):
        with pytest.raises(HalfbyteError, match="one scheme for all modules"):
            output_config({}, schemes)
