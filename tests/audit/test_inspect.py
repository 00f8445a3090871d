from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.audit.inspect import inspect
from halfbyte.audit.inspection import Inspection, WeightRow
from halfbyte.bench.synthetic import deepseek_v3, write_sparse_checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.schemes import PRESETS
from tests.audit.tamper import Q_PROJ, change, change_config, copied, drop, quantized
from tests.tiny import tiny_model

Make = Callable[[str], Path]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
O_PROJ = "model.layers.0.self_attn.o_proj"
Spec = tuple[str, tuple[int, ...]]


def _row(found: Inspection, name: str) -> WeightRow:
    (row,) = [row for row in found.rows if row.name == name]
    return row


def _foreign(path: Path, quantization: dict[str, Any] | None, tensors: dict[str, Spec]) -> Inspection:
    """A one-layer model with ``o_proj`` stored as ``tensors`` say (leaf -> dtype, shape)."""
    config = LLAMA if quantization is None else {**LLAMA, "quantization_config": quantization}
    stored = {
        "model.embed_tokens.weight": ("F16", (512, 256)),
        **{f"{O_PROJ}.{leaf}": spec for leaf, spec in tensors.items()},
        "model.norm.weight": ("F16", (256,)),
        "lm_head.weight": ("F16", (512, 256)),
    }
    write_sparse_checkpoint(path, config, stored)
    return inspect(path, scales=False)


def test_an_unquantized_checkpoint(llama: Path) -> None:
    found = inspect(llama)
    assert found.format == "unquantized"
    assert found.anomalies == []
    assert found.bits_per_weight == pytest.approx(16)
    assert found.bits_per_quantized_weight is None
    assert found.nbytes == sum(found.files.values())
    assert _row(found, Q_PROJ).kind.scheme == "BF16"
    assert _row(found, "lm_head").kind.role == "lm_head"
    assert found.bytes_by_kind["norms"] == 3 * 128 * 2
    assert found.bytes_by_kind["embeddings"] == found.bytes_by_kind["lm_head"] == 264 * 128 * 2


@pytest.mark.parametrize("scheme", PRESETS)
def test_every_preset_is_named(scheme: str, made: Make) -> None:
    found = inspect(made(scheme))
    row = _row(found, Q_PROJ)
    preset = PRESETS[scheme]
    assert (row.kind.scheme, row.kind.preset, row.kind.element) == (
        preset.label,
        scheme,
        preset.weights.element,
    )
    assert row.kind.shape == (128, 128)
    assert row.scales is not None
    assert row.scales.low > 0
    assert found.anomalies == []
    assert found.notes == []


def test_bits_and_bytes_are_those_on_disk(made: Make) -> None:
    found = inspect(made("w4a8"))
    row = _row(found, "model.layers.0.mlp.down_proj")
    stored = 128 * 256 // 2 + 128 * 2 * 2 + 16  # nibbles, two BF16 scales a row, the shape
    assert row.kind.nbytes == stored
    assert row.kind.bits_per_weight == 8 * stored / (128 * 256)
    assert found.parameters == inspect(made("fp8")).parameters
    assert found.nbytes == sum(found.files.values()) == sum(size for _, size in found.dtypes.values())
    assert found.quantized_bytes == sum(r.kind.nbytes for r in found.rows if r.kind.quantized)


def test_rows_are_merged_over_layers_and_experts(tmp_path: Path) -> None:
    source = tiny_model("qwen3_moe", tmp_path)
    found = inspect(quantized(source, tmp_path / "out"))
    rows = {row.name: row for row in found.grouped()}
    assert rows["model.layers.0-1.mlp.experts.0-3.up_proj"].weights == 8
    assert rows["model.layers.0-1.self_attn.q_proj"].weights == 2
    assert sum(row.weights for row in rows.values()) == len(found.rows) == len(found.single())
    whole = found.as_dict(every_weight=True)
    assert sum(weight["parameters"] for weight in whole["weights"]) == sum(
        weight["parameters"] for weight in found.as_dict()["weights"]
    )


def test_layers_that_differ_get_rows_of_their_own(tmp_path: Path) -> None:
    from halfbyte.quantization import job
    from halfbyte.recipe import Recipe

    source = tiny_model("llama", tmp_path, num_hidden_layers=4)
    job.run(job.prepare(source, Recipe(ignore=("re:model.layers.2.mlp.down_proj$",))), tmp_path / "out")
    rows = {row.name: row.kind.scheme for row in inspect(tmp_path / "out").grouped()}
    assert rows["model.layers.0-1,3.mlp.down_proj"] == "W4A8"
    assert rows["model.layers.2.mlp.down_proj"] == "BF16"


# Anomalies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "word"), [(0.0, "zero"), (-1.0, "negative"), (float("nan"), "NaN"), (float("inf"), "Inf")]
)
def test_a_bad_scale_is_named(value: float, word: str, fresh: Make) -> None:
    path = fresh("w4a8")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.weight_scale"][3, 0] = value

    change(path, spoil)
    (anomaly,) = inspect(path).anomalies
    assert anomaly.where == Q_PROJ
    assert word in anomaly.what
    assert "[3, 0]" in anomaly.what
    assert inspect(path, scales=False).anomalies == []
    (row,) = [row for row in inspect(path).grouped() if row.name == "model.layers.0.self_attn.q_proj"]
    assert row.anomalies == 1


def test_a_nan_byte_among_nvfp4_scales(fresh: Make) -> None:
    path = fresh("nvfp4")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.weight_scale"].view(torch.uint8)[0, 0] = 0x7F

    change(path, spoil)
    assert "NaN" in inspect(path).anomalies[0].what


def test_equal_scales(fresh: Make) -> None:
    path = fresh("w4a8")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.weight_scale"].fill_(1.0)

    change(path, spoil)
    (anomaly,) = inspect(path).anomalies
    assert "all 128 scales are 1" in anomaly.what


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_shape", "weight_packed"])
def test_a_missing_partner(leaf: str, fresh: Make) -> None:
    path = fresh("w4a8")
    drop(path, f"{Q_PROJ}.{leaf}")
    where = {anomaly.where for anomaly in inspect(path).anomalies}
    assert {Q_PROJ, f"{Q_PROJ}.weight_scale"} & where
    assert all("self_attn.q" in name for name in where)


def test_fused_partners_that_differ(fresh: Make, llama: Path) -> None:
    from safetensors.torch import load_file

    path = fresh("w4a8")
    name = "model.layers.0.self_attn.k_proj"
    plain = load_file(llama / "model.safetensors")[f"{name}.weight"]
    drop(path, f"{name}.")
    change(path, lambda tensors: tensors.update({f"{name}.weight": plain}))
    found = {anomaly.where: anomaly.what for anomaly in inspect(path).anomalies}
    assert "k_proj BF16" in found["model.layers.0.self_attn.qkv_proj"]
    assert "stored as BF16" in found[name]


def test_a_config_that_ignores_what_is_quantized(fresh: Make) -> None:
    path = fresh("w4a8")
    change_config(path, lambda config: config["quantization_config"]["ignore"].append(Q_PROJ))
    assert [anomaly.where for anomaly in inspect(path).anomalies] == [
        Q_PROJ,
        "model.layers.0.self_attn.qkv_proj",
    ]


def test_a_config_with_another_group_size(fresh: Make) -> None:
    path = fresh("w4a8")
    change_config(
        path,
        lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(
            group_size=64
        ),
    )
    assert "config says group 64" in inspect(path).anomalies[0].what


def test_a_head_that_is_stored_though_tied(tmp_path: Path, llama: Path) -> None:
    path = copied(llama, tmp_path / "tied")
    change_config(path, lambda config: config.update(tie_word_embeddings=True))
    (anomaly,) = inspect(path).anomalies
    assert anomaly.where == "lm_head"
    assert "ties" in anomaly.what


def test_nothing_is_quantized_though_declared(tmp_path: Path, made: Make, llama: Path) -> None:
    path = copied(llama, tmp_path / "plain")
    quantization = json.loads((made("w4a8") / "config.json").read_text())["quantization_config"]
    change_config(path, lambda config: config.update(quantization_config=quantization))
    assert "config.json" in {anomaly.where for anomaly in inspect(path).anomalies}


def test_kv_scales(fresh: Make) -> None:
    path = fresh("w4a8")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    change_config(path, lambda config: config["quantization_config"].update(kv_cache_scheme=scheme))
    found = inspect(path)
    assert found.kv_cache == "fp8 per tensor, static"
    assert any("no k_scale" in anomaly.what for anomaly in found.anomalies)
    attention = "model.layers.0.self_attn"
    change(path, lambda tensors: tensors.update({f"{attention}.k_scale": torch.tensor([0.05])}))
    assert [anomaly.where for anomaly in inspect(path).anomalies] == [attention]
    change(path, lambda tensors: tensors.update({f"{attention}.v_scale": torch.tensor([0.08])}))
    assert inspect(path).anomalies == []


# Foreign formats, from headers alone -------------------------------------------------------------------------------


def test_awq(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    found = _foreign(
        tmp_path,
        config,
        {"qweight": ("I32", (256, 32)), "qzeros": ("I32", (2, 32)), "scales": ("F16", (2, 256))},
    )
    kind = _row(found, O_PROJ).kind
    assert (kind.layout, kind.scheme, kind.preset, kind.group) == ("awq", "W4A16", "w4a16-asym", "128")
    assert kind.shape == (256, 256)
    assert found.format == "awq (gemm)"
    assert found.anomalies == []


@pytest.mark.parametrize("declared", [True, False])
def test_gptq(declared: bool, tmp_path: Path) -> None:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "checkpoint_format": "gptq_v2",
    }
    tensors: dict[str, Spec] = {
        "qweight": ("I32", (32, 256)),
        "qzeros": ("I32", (4, 32)),
        "scales": ("F16", (4, 256)),
        "g_idx": ("I32", (256,)),
    }
    found = _foreign(tmp_path, config if declared else None, tensors)
    kind = _row(found, O_PROJ).kind
    assert (kind.layout, kind.group, kind.shape) == ("gptq", "64", (256, 256))
    assert found.format == ("gptq (gptq_v2)" if declared else "gptq")
    assert found.anomalies == []


def test_gptq_rules_for_single_modules(tmp_path: Path) -> None:
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True,
        "dynamic": {"+:.*o_proj$": {"bits": 8, "group_size": 32}, "-:.*up_proj$": {}},
    }  # fmt: skip
    tensors: dict[str, Spec] = {
        "qweight": ("I32", (64, 256)), "qzeros": ("I32", (8, 64)), "scales": ("F16", (8, 256)),
    }  # fmt: skip
    found = _foreign(tmp_path, config, tensors)
    kind = _row(found, O_PROJ).kind
    assert (kind.element, kind.group, kind.shape) == ("int8", "32", (256, 256))
    assert found.anomalies == []


def test_block_fp8(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    found = _foreign(
        tmp_path, config, {"weight": ("F8_E4M3", (256, 256)), "weight_scale_inv": ("F32", (2, 2))}
    )
    kind = _row(found, O_PROJ).kind
    assert (kind.layout, kind.preset, kind.group) == ("fp8-block", "fp8_per_block", "128x128")
    assert found.anomalies == []


def test_tensor_fp8_with_static_inputs(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    found = _foreign(
        tmp_path,
        config,
        {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", ()), "input_scale": ("F32", ())},
    )
    assert _row(found, O_PROJ).kind.group == "tensor"
    assert found.anomalies == []


@pytest.mark.parametrize("in_config", [True, False])
def test_modelopt_nvfp4(in_config: bool, tmp_path: Path) -> None:
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    if not in_config:
        tmp_path.mkdir(exist_ok=True)
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    found = _foreign(
        tmp_path,
        {**said, "quant_method": "modelopt"} if in_config else None,
        {
            "weight": ("U8", (256, 128)),
            "weight_scale": ("F8_E4M3", (256, 16)),
            "weight_scale_2": ("F32", ()),
            "input_scale": ("F32", ()),
        },
    )
    kind = _row(found, O_PROJ).kind
    assert (kind.layout, kind.scheme, kind.group, kind.shape) == ("modelopt-nvfp4", "W4A4", "16", (256, 256))
    assert found.kv_cache == "fp8"
    assert found.anomalies == []


def test_modelopt_w4a8_awq(tmp_path: Path) -> None:
    found = _foreign(
        tmp_path,
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {
            "weight": ("U8", (128, 256)),
            "weight_scale": ("F16", (256, 2)),
            "pre_quant_scale": ("F16", (256,)),
            "input_scale": ("F32", ()),
        },
    )
    kind = _row(found, O_PROJ).kind
    assert (kind.layout, kind.scheme, kind.shape) == ("modelopt-int4", "W4A8", (256, 256))


@pytest.mark.parametrize(
    ("tensors", "layout", "shape"),
    [
        (
            {"qweight": ("I8", (256, 128)), "s1_scales": ("F16", (256,)), "s1_szeros": ("F16", (256,))},
            "qserve",
            (256, 256),
        ),
        (
            {
                "qweight": ("I8", (256, 128)),
                "s1_scales": ("F16", (256,)),
                "s2_scales": ("I8", (2, 256)),
                "s2_zeros": ("I8", (2, 256)),
            },
            "qserve",
            (256, 256),
        ),
        ({"weight": ("I8", (256, 256)), "dequant_scale": ("F16", (256,))}, "qserve-w8a8", (256, 256)),
        ({"weight": ("I8", (256, 256)), "SCB": ("F32", (256,))}, "bitsandbytes", (256, 256)),
        ({"weight": ("U8", (32768, 1)), "weight.absmax": ("F32", (1024,))}, "bitsandbytes", (32768, 1)),
        (
            {
                "weight": ("I8", (256, 128)),
                "weight_scale_inv": ("F32", (256, 2)),
                "input_scale": ("BF16", (1,)),
            },
            "w4afp8",
            (256, 256),
        ),
        ({"trellis": ("I16", (16, 16, 48)), "suh": ("F16", (256,)), "svh": ("F16", (256,))}, "exl3", (256, 256)),
        ({"_weight_qdata": ("F8_E4M3", (256, 256)), "_weight_scale": ("F32", (256, 1))}, "torchao", (256, 256)),
        ({"weight_packed": ("U8", (256, 128)), "weight_scale": ("U8", (256, 8))}, "mxfp4-pack-quantized", (256, 256)),
        ({"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("U8", (256, 8))}, "mxfp8-quantized", (256, 256)),
        ({"weight": ("I8", (256, 256)), "weight_scale": ("BF16", (256, 1))}, "int-quantized", (256, 256)),
    ],
)  # fmt: skip
def test_forms_told_from_names_alone(
    tensors: dict[str, Spec], layout: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    found = _foreign(tmp_path, None, tensors)
    kind = _row(found, O_PROJ).kind
    assert (kind.layout, kind.shape) == (layout, shape)
    assert found.format == layout
    assert found.anomalies == []
    assert found.bytes_by_kind["linear weights"] == kind.code_nbytes > 0


def test_gpt_oss_blocks(tmp_path: Path) -> None:
    config = {
        **LLAMA, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4,
        "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    tensors: dict[str, Spec] = {
        f"{experts}_blocks": ("U8", (4, 128, 8, 16)),
        f"{experts}_scales": ("U8", (4, 128, 8)),
        f"{experts}_bias": ("BF16", (4, 128)),
    }
    write_sparse_checkpoint(tmp_path, config, tensors)
    found = inspect(tmp_path)
    row = _row(found, experts)
    assert (row.kind.layout, row.kind.role, row.kind.shape) == ("mxfp4-blocks", "expert", (4, 128, 256))
    assert row.kind.bits_per_weight == 4.25


def test_an_unknown_method_is_described_all_the_same(tmp_path: Path) -> None:
    found = _foreign(
        tmp_path,
        {"quant_method": "newest"},
        {"weight": ("I8", (256, 256)), "weight_scale": ("F16", (256, 1))},
    )
    assert found.format == "newest"
    assert _row(found, O_PROJ).kind.layout == "int-quantized"
    assert any("newest" in note for note in found.notes)


@pytest.mark.parametrize(
    "tensors",
    [
        {
            "weight_packed": ("I32", (256, 32)),
            "weight_scale": ("BF16", (256, 3)),
            "weight_shape": ("I64", (2,)),
        },
        {"weight_packed": ("I32", (0, 0)), "weight_scale": ("BF16", (0, 0)), "weight_shape": ("I64", (2,))},
        {"weight_packed": ("F32", (256,)), "weight_scale": ("BF16", (256, 2))},
        {"weight_packed": ("I32", ()), "weight_scale": ("I8", ())},
        {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("I64", (1,))},
        {"qweight": ("I32", (7,)), "scales": ("F16", ())},
        {"qweight": ("I8", (7, 7, 7)), "s1_scales": ("F16", (7,))},
        {"trellis": ("I16", (4,)), "suh": ("F16", (1,)), "svh": ("F16", (1,))},
        {"weight": ("U8", (5,)), "weight_scale": ("F8_E4M3", (0,)), "weight_scale_2": ("F32", ())},
    ],
)
def test_shapes_that_no_layout_has_are_anomalies_and_no_crash(
    tensors: dict[str, Spec], tmp_path: Path
) -> None:
    found = _foreign(tmp_path, None, tensors)
    assert any(anomaly.where == O_PROJ for anomaly in found.anomalies)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 13}}}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": "x"}}}},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "gptq"},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "modelopt", "quant_algo": "NEW"},
        {"quant_method": "compressed-tensors", "ignore": ["re:("], "config_groups": {}},
        {"quant_method": "awq", "group_size": "big"},
    ],
)
def test_configs_that_cannot_be_understood_are_noted(quantization: dict[str, Any], tmp_path: Path) -> None:
    found = _foreign(tmp_path, quantization, {"weight": ("F16", (256, 256))})
    assert found.notes or quantization == {"quant_method": "compressed-tensors"}


# Size ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [True, False])
def test_671_billion_parameters_without_torch(fp8: bool, tmp_path: Path) -> None:
    config, tensors = deepseek_v3(fp8)
    write_sparse_checkpoint(tmp_path, config, tensors, shards=163)
    code = (
        "import sys; from halfbyte.audit.inspect import inspect; found = inspect(sys.argv[1]);"
        "assert 'torch' not in sys.modules; assert 'pydantic' not in sys.modules;"
        "print(found.parameters, len(found.grouped()), len(found.anomalies), len(found.files))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    parameters, rows, anomalies, files = map(int, ran.stdout.split())
    assert parameters == 684_489_845_504
    assert rows < 40
    assert anomalies == 0
    assert files == 163


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match="no such directory"):
        inspect(tmp_path / "nothing")
    with pytest.raises(HalfbyteError, match=r"no config\.json"):
        inspect(tmp_path)
