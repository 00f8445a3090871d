from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from halfbyte.audit.declared import declared
from halfbyte.audit.decode import WeightDecoder
from halfbyte.audit.modules import gather
from halfbyte.audit.verify import verify
from halfbyte.checkpoint.quantization_config import quantization_config
from halfbyte.checkpoint.quantized_weight import encode
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role, WeightSource
from halfbyte.schemes import PRESETS, Scheme
from tests.audit.tamper import change
from tests.checkpoint.files import CONFIG, write_checkpoint

MODULE = "model.layers.0.self_attn.o_proj"


def _weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random, with what breaks packing and scales: zeros, one-sided and tiny groups, an outlier."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05
    weight[0] = 0
    weight[1] = weight[1].abs()
    weight[2] *= 1e-6
    weight[3, 5] = 4.0
    return weight.bfloat16()


def _stored(
    path: Path, scheme: Scheme, weight: torch.Tensor, model_dtype: str = "bf16"
) -> tuple[Path, QuantizedTensor]:
    q = quantize(weight, scheme.weights.with_scale(model_dtype))
    rows, columns = weight.shape
    info = ModuleInfo(MODULE, Role.LINEAR, rows, columns, WeightSource(f"{MODULE}.weight"))
    layout = ModelLayout("llama", [info], False, known=True)
    config = {**CONFIG, "quantization_config": quantization_config({MODULE: scheme}, layout)}
    write_checkpoint(path, {"model.safetensors": encode(MODULE, scheme, q, model_dtype)}, config=config)
    return path, q


def _decoded(path: Path) -> np.ndarray:
    checkpoint = Checkpoint.open(path)
    (module,) = gather(checkpoint.tensors, declared(checkpoint.config)).modules
    assert not module.stored.faults
    decoder = WeightDecoder(checkpoint, module)
    rows = [tiles.scaled(tiles.by_tile(tiles.table.value_of(tiles.codes))) for tiles in decoder.chunks()]
    assert decoder.padding_is_zero
    return np.concatenate([chunk.reshape(chunk.shape[0], -1) for chunk in rows])


@pytest.mark.parametrize("model_dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_decodes_to_its_reference_meaning(name: str, model_dtype: str, tmp_path: Path) -> None:
    weight = _weight(136, 256)
    path, q = _stored(tmp_path, PRESETS[name], weight, model_dtype)
    # A global scale is stored as its reciprocal, so that the last bit of the product may differ.
    tolerance = 3e-7 if q.format.outer == "tensor" else 0
    np.testing.assert_allclose(_decoded(path), dequantize(q).numpy(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "w4a8-int8"])
def test_every_preset_decodes_to_what_compressed_tensors_decodes(name: str, tmp_path: Path) -> None:
    from tests.checkpoint import oracle

    weight = _weight(
        256, 256, seed=1
    )  # whole blocks: the library spreads the last, smaller one over all rows
    path, q = _stored(tmp_path, PRESETS[name], weight, "f32")
    checkpoint = Checkpoint.open(path)
    stored = {tensor: checkpoint.load(tensor) for tensor in checkpoint.tensors}
    group = oracle.only_group(checkpoint.config["quantization_config"])
    theirs = oracle.decompress(MODULE, stored, group).float().numpy()
    # The library multiplies in bf16 where a format has no 16-bit scale to say otherwise.
    rounding = 2.0**-8 if q.format.scale in ("e8m0", "e4m3") else 1e-6
    np.testing.assert_allclose(_decoded(path), theirs, rtol=rounding, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_rows_that_fill_no_word_or_chunk(rows: int, tmp_path: Path) -> None:
    weight = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    path, q = _stored(tmp_path, PRESETS["w4a16-asym"], weight)
    np.testing.assert_array_equal(_decoded(path), dequantize(q).numpy())


@pytest.mark.parametrize("shape", [(130, 200), (1, 129), (256, 128)])
def test_ragged_blocks(shape: tuple[int, int], tmp_path: Path) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    path, q = _stored(tmp_path, PRESETS["fp8_per_block"], weight)
    np.testing.assert_array_equal(_decoded(path), dequantize(q).numpy())


def _two_bit_channels(path: Path) -> tuple[Path, QuantizedTensor]:
    """A width that fills no word: 20 codes of 2 bits take two words of 16."""
    weight = torch.randn(5, 20, generator=torch.Generator().manual_seed(4)).bfloat16()
    return _stored(path, Scheme("w2", TensorFormat("int2", "channel")), weight)


def test_a_padded_word(tmp_path: Path) -> None:
    path, q = _two_bit_channels(tmp_path)
    np.testing.assert_array_equal(_decoded(path), dequantize(q).numpy())
    assert verify(path).passed


def test_padding_that_is_not_zero(tmp_path: Path) -> None:
    path, _ = _two_bit_channels(tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MODULE}.weight_packed"][4, 1] |= 1 << 30

    change(path, spoil)
    (error,) = verify(path).errors
    assert (error.rule, error.where) == ("padding", f"{MODULE}.weight_packed")


def test_a_block_scale_by_its_deepseek_name(tmp_path: Path) -> None:
    """``weight_scale_inv`` multiplies, whatever its name says."""
    codes = torch.tensor([[1.0] * 256] * 128).to(torch.float8_e4m3fn)
    scales = torch.tensor([[2.0, 0.5]])
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    write_checkpoint(
        tmp_path,
        {"model.safetensors": {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale_inv": scales}},
        config={**CONFIG, "quantization_config": quantization},
    )
    expected = np.repeat([[2.0, 0.5]], 128, axis=1).repeat(128, axis=0)
    np.testing.assert_array_equal(_decoded(tmp_path), expected)
