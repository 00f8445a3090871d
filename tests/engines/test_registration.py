"""When halfbyte's layers run, and when transformers is left as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers.quantizers import auto

from halfbyte.engines.transformers import register, unregister
from halfbyte.engines.transformers.loading import load
from halfbyte.errors import HalfbyteError
from halfbyte.layers.linear import QuantLinear
from tests.engines.checkpoints import Checkpoints

IDS = torch.arange(3, 60).reshape(3, 19)


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.strip()


def test_importing_halfbyte_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, halfbyte; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert python(code) == "[]"


# The shortest script that people write, both ways round.
HALFBYTE_FIRST = "import halfbyte, transformers"
TRANSFORMERS_FIRST = (
    "from transformers import AutoModelForCausalLM; import transformers.quantizers; import halfbyte"
)
REST = """
import transformers, logging
from transformers.quantizers import auto
table = auto.AUTO_QUANTIZER_MAPPING
print(table["compressed-tensors"].__module__.split(".")[0], "halfbyte" in table)
"""


@pytest.mark.parametrize("imports", [HALFBYTE_FIRST, TRANSFORMERS_FIRST])
def test_either_order_of_imports_registers(imports: str) -> None:
    assert python(imports + REST) == "halfbyte True"


def test_the_environment_leaves_transformers_alone() -> None:
    assert python(HALFBYTE_FIRST + REST, HALFBYTE_TRANSFORMERS="0") == "transformers False"


def test_from_pretrained_runs_our_layers_after_import(checkpoints: Checkpoints) -> None:
    path = checkpoints.quantized("llama", "w4a8")
    code = f"""
import halfbyte
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(path)!r})
print(type(model.model.layers[0].mlp.up_proj).__name__)
"""
    assert python(code) == "QuantLinear"


def test_unregister_and_register_again() -> None:
    register()
    ours = auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"]
    unregister()
    try:
        stock = auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"]
        assert stock.__name__ == "CompressedTensorsHfQuantizer"
        assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] is CompressedTensorsConfig
        assert "halfbyte" not in auto.AUTO_QUANTIZER_MAPPING
        unregister()
    finally:
        register()
    register()
    assert auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"] is ours


def stock_logits(path: Path) -> torch.Tensor:
    unregister()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    finally:
        register()
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("scheme", ["w4a8", "w4a16", "w8a16", "w8a8-int8", "fp8"])
def test_the_same_logits_on_transformers_own_path(scheme: str, checkpoints: Checkpoints) -> None:
    pytest.importorskip("compressed_tensors")
    path = checkpoints.quantized("llama", scheme)
    model, _ = load(path, dtype=torch.float32)
    with torch.inference_mode():
        got = model(IDS).logits
    want = stock_logits(path)
    # Weights mean the same to the last bit. FP8 inputs round the other way here and there; for INT8 it takes its scale
    # from a range of [-128, 127], where ours and the kernels' is [-127, 127], so all of them may.
    limit = {"w4a16": 1e-5, "w8a16": 1e-5, "w8a8-int8": 0.06}.get(scheme, 0.03)
    assert (got - want).norm() < limit * want.norm()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_what_the_caller_asks_of_transformers_own_path_is_done(checkpoints: Checkpoints) -> None:
    pytest.importorskip("compressed_tensors")
    path = checkpoints.quantized("llama", "w4a16")
    asked = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=asked, dtype=torch.float32)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    ours, _ = load(path, dtype=torch.float32)
    with torch.inference_mode():
        got, want = model(IDS).logits, ours(IDS).logits
    assert (got - want).norm() < 0.02 * want.norm()  # it rounds the weights to BF16


def changed(path: Path, out: Path, change: str) -> Path:
    """A copy of a checkpoint whose config names something that halfbyte does not read."""
    shutil.copytree(path, out)
    config = json.loads((out / "config.json").read_text())
    quantization = config["quantization_config"]
    inputs = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    if change == "modules":
        quantization["ignore"].append("re:.*q_proj")
    elif change == "inputs":
        quantization["config_groups"]["group_0"]["input_activations"] = inputs
    else:
        group = {**quantization["config_groups"]["group_0"], "input_activations": inputs}
        quantization["config_groups"]["group_1"] = {**group, "targets": ["re:.*layers.1.mlp.up_proj$"]}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("change", ["inputs", "last inputs", "modules"])
def test_what_halfbyte_cannot_read_is_left_to_transformers(
    change: str, checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("compressed_tensors")
    register()
    path = changed(checkpoints.quantized("llama", "w4a16"), tmp_path / "changed", change)
    with caplog.at_level("WARNING", "halfbyte"):
        model = AutoModelForCausalLM.from_pretrained(path)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    said = [record.message for record in caplog.records if record.name.startswith("halfbyte")]
    assert len(said) == 1
    assert said[0].startswith("Left to transformers' own compressed-tensors path, because halfbyte says: ")


def test_a_halfbyte_checkpoint_that_cannot_be_read_is_an_error(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = tmp_path / "changed"
    shutil.copytree(checkpoints.quantized("llama", "w4a16"), path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= {"quant_method": "halfbyte", "config_groups": 3}
    (path / "config.json").write_text(json.dumps(config))
    register()
    with pytest.raises(HalfbyteError, match="config_groups"):
        AutoModelForCausalLM.from_pretrained(path)
