"""W4A8 mixtures in compressed-tensors: one set of tensors for each expert, as vLLM's loader looks for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import halfbyte
from halfbyte.audit.verify import verify
from halfbyte.checkpoint.quantization_config import parse_config
from halfbyte.checkpoint.quantized_weight import decode
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.engines.transformers.loading import load
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize
from halfbyte.layers.linear import QuantLinear
from halfbyte.models.layout import Role
from tests.audit.tamper import change, change_tensor, copied, drop
from tests.checkpoint import oracle
from tests.tiny import EXPERTS, tiny_model

HIDDEN = INNER = 256  # vLLM's kernel takes multiples of this
GROUP, CODES_PER_WORD = 128, 8


class Family(NamedTuple):
    """sizes: config fields. mixture: name of a block's experts. gate, up, down: of an expert's projections."""

    sizes: dict[str, int]
    mixture: str
    gate: str
    up: str
    down: str


_WIDTH = {"hidden_size": HIDDEN, "head_dim": 64}
_MLP = "model.layers.{}.mlp.experts"
FAMILIES = {
    "mixtral": Family(
        {**_WIDTH, "intermediate_size": INNER},
        "model.layers.{}.block_sparse_moe.experts",
        *("w1", "w3", "w2"),
    ),
    "qwen3_moe": Family(
        {**_WIDTH, "moe_intermediate_size": INNER}, _MLP, *("gate_proj", "up_proj", "down_proj")
    ),
    "olmoe": Family({**_WIDTH, "intermediate_size": INNER}, _MLP, *("gate_proj", "up_proj", "down_proj")),
}


@pytest.fixture(scope="module", params=FAMILIES)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Path, Path]:
    """Family, source and what it became."""
    family, root = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    source = tiny_model(request.param, root, **family.sizes)
    halfbyte.quantize(source, root / "out", "w4a8")
    return family, source, root / "out"


def room() -> dict[str, torch.Tensor]:
    """What vLLM's W4A8 method allocates for one block's experts, on the meta device.

    Source: its ``compressed_tensors_moe_w4a8_fp8.py``; shapes are loaded into fp32, as any number.
    """

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(EXPERTS, *shape, dtype=dtype, device="meta")

    return {
        "w13_weight_packed": empty(torch.int32, 2 * INNER, HIDDEN // CODES_PER_WORD),
        "w13_weight_scale": empty(torch.bfloat16, 2 * INNER, HIDDEN // GROUP),
        "w13_weight_shape": empty(torch.float32, 2),
        "w2_weight_packed": empty(torch.int32, HIDDEN, INNER // CODES_PER_WORD),
        "w2_weight_scale": empty(torch.bfloat16, HIDDEN, INNER // GROUP),
        "w2_weight_shape": empty(torch.float32, 2),
    }


def test_every_tensor_has_a_place_and_every_place_a_tensor(written: tuple[Family, Path, Path]) -> None:
    family, _, path = written
    checkpoint = Checkpoint.open(path)
    for block in (0, 1):
        mixture = family.mixture.format(block)
        allocated, filled = room(), set()
        for name, info in checkpoint.tensors.items():
            if not name.startswith(f"{mixture}."):
                continue
            expert, projection, leaf = name.removeprefix(f"{mixture}.").split(".")
            shard = {family.gate: ("w13", 0), family.up: ("w13", 1), family.down: ("w2", 0)}[projection]
            place = allocated[f"{shard[0]}_{leaf}"][int(expert)]
            if leaf != "weight_shape":
                # Gate and up lie one above the other.
                wanted = place.shape if shard[0] == "w2" else (place.shape[0] // 2, place.shape[1])
                dtype = {"weight_packed": "I32", "weight_scale": "BF16"}[leaf]
                assert (info.dtype, info.shape) == (dtype, tuple(wanted)), name
            else:
                assert (info.dtype, info.shape) == ("I64", (2,)), name
            filled.add((int(expert), shard, leaf))
        shards = [("w13", 0), ("w13", 1), ("w2", 0)]
        leaves = ("weight_packed", "weight_scale", "weight_shape")
        assert filled == {(e, s, leaf) for e in range(EXPERTS) for s in shards for leaf in leaves}


def test_vllms_rules_accept_it(written: tuple[Family, Path, Path]) -> None:
    _, source, path = written
    assert verify(path, against=source, require_vllm=True).passed
    entry = Checkpoint.open(path).config["quantization_config"]
    (group,) = entry["config_groups"].values()
    assert (entry["quant_method"], group["targets"], group["format"]) == (
        *("compressed-tensors", ["Linear"]),
        "pack-quantized",
    )
    assert any("gate" in pattern for pattern in entry["ignore"])  # the router


def test_numbers_are_those_of_compressed_tensors(written: tuple[Family, Path, Path]) -> None:
    family, _, path = written
    checkpoint = Checkpoint.open(path)
    entry = checkpoint.config["quantization_config"]
    declared, group = parse_config(entry), oracle.only_group(entry)
    model, _ = load(path)
    layers = {module.name: module for module in model.modules() if isinstance(module, QuantLinear)}
    for expert in range(EXPERTS):
        for projection in (family.gate, family.up, family.down):
            module = f"{family.mixture.format(1)}.{expert}.{projection}"
            parts = {
                name: checkpoint.load(name) for name in checkpoint.tensors if name.startswith(f"{module}.")
            }
            scheme = declared.scheme_for(module, Role.EXPERT, checkpoint.tensors)
            assert scheme is not None
            theirs = oracle.decompress(module, parts, group)
            ours = dequantize(decode(module, scheme, parts))
            assert torch.equal(ours.to(theirs.dtype), theirs), module
            layer = layers[module.replace("block_sparse_moe", "mlp")]
            assert torch.equal(dequantize(layer.unpack()), ours), module


# What is wrong with one expert is said when the files are loaded


@pytest.mark.parametrize(
    ("leaf", "change", "words"),
    [
        ("weight_packed", lambda t: t[:, :16], r"is I32 \[256, 16\], its scheme calls for I32 \[256, 32\]"),
        ("weight_packed", lambda t: t.view(torch.int8), r"is I8 \[256, 128\], its scheme calls for I32"),
        (
            "weight_scale",
            lambda t: t.repeat(1, 2),
            r"is BF16 \[256, 4\], its scheme calls for BF16 \[256, 2\]",
        ),
        ("weight_shape", lambda t: t * 0, "must hold out_features and in_features"),
    ],
)
def test_a_misfit_is_named(
    leaf: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    words: str,
    written: tuple[Family, Path, Path],
    tmp_path: Path,
) -> None:
    family, _, path = written
    damaged = copied(path, tmp_path / "out")
    name = f"{family.mixture.format(1)}.2.{family.down}.{leaf}"
    change_tensor(damaged, name, change)
    with pytest.raises(HalfbyteError, match=rf"{re.escape(name)}:? {words}"):
        load(damaged)


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ("weight_scale", "weight_scale is missing beside"),
        ("weight_shape", "weight_shape is missing beside weight_packed"),
        ("", "of expert 2 of 4 is not in the checkpoint"),
    ],
)
def test_a_missing_tensor_is_named(
    leaf: str, words: str, written: tuple[Family, Path, Path], tmp_path: Path
) -> None:
    family, _, path = written
    damaged = copied(path, tmp_path / "out")
    drop(damaged, f"{family.mixture.format(1)}.2.{family.down}.{leaf}")
    with pytest.raises(HalfbyteError, match=words):
        load(damaged)


def test_an_expert_in_another_scheme_than_config_says(
    written: tuple[Family, Path, Path], tmp_path: Path
) -> None:
    family, _, path = written
    damaged = copied(path, tmp_path / "out")
    module = f"{family.mixture.format(1)}.2.{family.down}"

    def to_int8(tensors: dict[str, torch.Tensor]) -> None:
        for leaf in ("weight_packed", "weight_shape"):
            del tensors[f"{module}.{leaf}"]
        tensors[f"{module}.weight"] = torch.ones(HIDDEN, INNER, dtype=torch.int8)
        tensors[f"{module}.weight_scale"] = torch.ones(HIDDEN, 1).bfloat16()

    change(damaged, to_int8)
    with pytest.raises(HalfbyteError, match=rf"{re.escape(module)}.* its scheme calls for BF16 \[256, 2\]"):
        load(damaged)
