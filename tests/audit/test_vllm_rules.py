from __future__ import annotations

from typing import Any

import pytest

from halfbyte.audit.declared import declared
from halfbyte.audit.modules import gather
from halfbyte.audit.vllm_rules import vllm_refusals
from halfbyte.bench.synthetic import TensorSpec
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.models.describe import describe
from tests.audit.test_ct_schema import BASE

O_PROJ = "model.layers.0.self_attn.o_proj"
CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 256, "num_local_experts": 4}


def _w4a8(rows: int, columns: int, group: int = 128) -> dict[str, TensorSpec]:
    return {
        "weight_packed": ("I32", (rows, columns // 8)),
        "weight_scale": ("BF16", (rows, columns // group)),
        "weight_shape": ("I64", (2,)),
    }


def _refusals(
    modules: dict[str, dict[str, TensorSpec]], args: dict[str, Any] | None = None, dtype: str = "bf16"
) -> list[str] | None:
    """What vLLM refuses, as ``module: message``. args: changes to the weights' arguments in the config."""
    group = BASE["config_groups"]["group_0"]
    quantization = {
        **BASE,
        "config_groups": {"group_0": {**group, "weights": {**group["weights"], **(args or {})}}},
    }
    tensors = {
        f"{module}.{leaf}": TensorInfo(f"{module}.{leaf}", *spec, file=None, offset=0, nbytes=1)  # type: ignore[arg-type]
        for module, leaves in modules.items()
        for leaf, spec in leaves.items()
    }
    gathered = gather(tensors, declared({"quantization_config": quantization}))
    infos = {info.name: info for info in describe(CONFIG, gathered.shapes()).modules}
    found = vllm_refusals(gathered.modules, infos, dtype)
    return None if found is None else [f"{finding.where}: {finding.message}" for finding in found]


def test_what_vllm_loads() -> None:
    assert _refusals({O_PROJ: _w4a8(256, 384)}) == []


def test_nothing_to_judge() -> None:
    assert _refusals({O_PROJ: {"weight": ("BF16", (256, 256))}}) is None


@pytest.mark.parametrize("group", [32, 64])
def test_other_groups(group: int) -> None:
    found = _refusals({O_PROJ: _w4a8(256, 256, group)}, {"group_size": group})
    assert found is not None
    assert f"{O_PROJ}: group size {group}; accepted: 128" in found


def test_channels() -> None:
    parts = {**_w4a8(256, 256), "weight_scale": ("BF16", (256, 1))}
    found = _refusals({O_PROJ: parts}, {"strategy": "channel", "group_size": None})
    assert found is not None
    assert f"{O_PROJ}: scales per channel; accepted: per group of 128" in found


def test_asymmetric() -> None:
    parts: dict[str, TensorSpec] = {**_w4a8(256, 256), "weight_zero_point": ("I32", (32, 2))}
    assert _refusals({O_PROJ: parts}, {"symmetric": False}) == [
        f"{O_PROJ}: asymmetric weights; accepted: symmetric"
    ]


def test_a_model_in_half_precision() -> None:
    assert _refusals({O_PROJ: _w4a8(256, 256)}, dtype="f16") == [
        f"{O_PROJ}: model computes in f16; accepted: bf16"
    ]


@pytest.mark.parametrize(
    ("leaf", "spec"),
    [("weight_shape", ("I32", (2,))), ("weight_scale", ("F32", (256, 2))), ("weight_shape", None)],
)
def test_parameters_of_another_kind(leaf: str, spec: TensorSpec | None) -> None:
    parts: dict[str, Any] = {**_w4a8(256, 256), leaf: spec}
    if spec is None:
        del parts[leaf]
    found = _refusals({O_PROJ: parts})
    assert found is not None
    assert len(found) == 1
    assert leaf in found[0]


def test_rows_count_together_where_engines_fuse() -> None:
    """64 rows are no multiple of 128; q, k and v of 128 + 64 + 64 are."""
    attention = "model.layers.0.self_attn"
    whole = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    assert _refusals({f"{attention}.{name}": _w4a8(rows, 256) for name, rows in whole.items()}) == []
    odd = {"q_proj": 128, "k_proj": 32, "v_proj": 32}
    found = _refusals({f"{attention}.{name}": _w4a8(rows, 256) for name, rows in odd.items()})
    assert found == [f"{attention}.qkv_proj: out_features 192; accepted: multiples of 128"]


def test_fused_partners() -> None:
    attention = "model.layers.0.self_attn"
    found = _refusals(
        {
            f"{attention}.q_proj": _w4a8(128, 256),
            f"{attention}.k_proj": {"weight": ("BF16", (128, 256))},
            f"{attention}.v_proj": _w4a8(128, 256),
        }
    )
    assert found == [f"{attention}.qkv_proj: k_proj are not W4A8 as the others are"]


def test_experts_need_multiples_of_256_and_one_scheme() -> None:
    expert = "model.layers.0.mlp.experts.0"
    sizes = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
    found = _refusals({f"{expert}.{name}": _w4a8(*shape) for name, shape in sizes.items()})
    assert found is not None
    assert len(found) == 3
    assert all("multiples of 256" in line for line in found)
    mixed: dict[str, dict[str, TensorSpec]] = {
        f"{expert}.gate_proj": _w4a8(256, 256),
        f"{expert}.up_proj": _w4a8(256, 256),
        f"{expert}.down_proj": {"weight": ("BF16", (256, 256))},
    }
    assert _refusals(mixed) == [f"{expert}: down_proj are not W4A8 as the others are"]
