from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.audit.ct_schema import schema_problems

BASE: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
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


def _with(path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    *parents, last = path.split("/")
    place = config
    for part in parents:
        place = place[part]
    place[last] = value
    return config


def _library_accepts(config: dict[str, Any]) -> bool:
    from tests.checkpoint import oracle

    try:
        oracle.validate(copy.deepcopy(config))
    except (ValueError, NotImplementedError, TypeError):
        return False
    return True


def test_the_config_that_is_known_to_load() -> None:
    assert schema_problems(BASE) == []
    assert _library_accepts(BASE)


GROUP = "config_groups/group_0"
CASES = [
    (f"{GROUP}/weights/clip", "mse", "clip"),
    (f"{GROUP}/kernel", "ours", "kernel"),
    (f"{GROUP}/weights/strategy", "per_group", "strategy"),
    (f"{GROUP}/weights/group_size", -2, "group_size"),
    (f"{GROUP}/weights/group_size", 0, "group_size"),
    (f"{GROUP}/weights/group_size", None, "group_size"),
    (f"{GROUP}/weights/strategy", "channel", "group_size"),
    (f"{GROUP}/weights/type", "integer", "type"),
    (f"{GROUP}/weights/num_bits", "four", "num_bits"),
    (f"{GROUP}/weights/actorder", "random", "actorder"),
    (f"{GROUP}/weights/scale_dtype", "torch.float12", "scale_dtype"),
    (f"{GROUP}/weights/block_structure", [128], "block_structure"),
    (f"{GROUP}/weights/block_structure", [128, 128], "block_structure"),
    (f"{GROUP}/weights/dynamic", "global", "dynamic"),
    (f"{GROUP}/weights/dynamic", "local", "dynamic"),
    (f"{GROUP}/input_activations/dynamic", False, "dynamic"),
    (f"{GROUP}/input_activations/strategy", "channel", "strategy"),
    (f"{GROUP}/input_activations/actorder", "weight", "actorder"),
    (f"{GROUP}/format", "mixed-precision", "format"),
    (f"{GROUP}/format", "two-level-pack-quantized", "format"),
    (f"{GROUP}/targets", "Linear", "targets"),
    (f"{GROUP}/targets", None, "targets"),
    ("config_groups", None, "config_groups"),
    ("quantization_status", "done", "quantization_status"),
    ("ignore", "lm_head", "ignore"),
    ("kv_cache_scheme", {"num_bits": 8, "bits": 8}, "kv_cache_scheme.bits"),
]


@pytest.mark.parametrize(("path", "value", "named"), CASES)
def test_what_the_library_refuses_is_refused_and_named(path: str, value: Any, named: str) -> None:
    config = _with(path, value)
    assert not _library_accepts(config)
    problems = schema_problems(config)
    assert any(named in problem.where for problem in problems)
    assert all(repr(problem.value) in str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("unknown_top_level", 1),
        ("sparsity_config", {}),
        ("ignore", None),
        ("ignore", ["re:.*lm_head$"]),
        ("global_compression_ratio", 1.5),
        ("kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}),
        (f"{GROUP}/input_activations", None),
        (f"{GROUP}/weights/observer", "minmax"),
        (f"{GROUP}/weights/scale_dtype", "torch.bfloat16"),
        (f"{GROUP}/weights/zp_dtype", "torch.int8"),
        (f"{GROUP}/weights/actorder", None),
        (f"{GROUP}/weights/actorder", "static"),
        (f"{GROUP}/weights/type", "INT"),
    ],
)
def test_what_the_library_accepts_is_accepted(path: str, value: Any) -> None:
    config = _with(path, value)
    assert _library_accepts(config)
    assert schema_problems(config) == []


_ARGS = st.fixed_dictionaries(
    {},
    optional={
        "num_bits": st.sampled_from([2, 3, 4, 6, 8, 16]),
        "type": st.sampled_from(["int", "float", "real"]),
        "symmetric": st.booleans(),
        "strategy": st.sampled_from(
            [None, "tensor", "channel", "group", "block", "token", "tensor_group", "attn_head", "row"]
        ),
        "group_size": st.sampled_from([None, -2, -1, 16, 32, 128]),
        "block_structure": st.sampled_from([None, [128, 128], "128x128", [1, 2, 3]]),
        "dynamic": st.sampled_from([True, False, "local", "never"]),
        "actorder": st.sampled_from([None, "weight", "static"]),
        "scale_dtype": st.sampled_from([None, "torch.uint8", "float8_e4m3fn", "torch.nothing"]),
        "observer": st.sampled_from([None, "minmax"]),
        "surprise": st.just(1),
    },
)


@settings(max_examples=400, deadline=None)
@given(weights=_ARGS, inputs=st.none() | _ARGS)
def test_the_schema_agrees_with_the_library(weights: dict[str, Any], inputs: dict[str, Any] | None) -> None:
    config = _with(f"{GROUP}/weights", weights)
    config["config_groups"]["group_0"]["input_activations"] = inputs
    assert (schema_problems(config) == []) == _library_accepts(config)
