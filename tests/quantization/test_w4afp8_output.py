"""Whole runs whose output is in SGLang's w4afp8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte.audit.verify import verify
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.w4afp8 import decode
from halfbyte.checkpoint.w4afp8_config import experts_scheme
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantize import quantize as round_to_nearest
from halfbyte.models.describe import describe
from halfbyte.models.layout import Role
from halfbyte.quantization import job
from halfbyte.recipe import Recipe
from tests.quantization.calibrated_runs import contents, quantize, samples
from tests.tiny import tiny_model

IDS = torch.arange(3, 60)[None]
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {family: tiny_model(family, root) for family in FAMILIES}


def input_scales(path: Path) -> dict[str, float]:
    stored = Checkpoint.open(path)
    return {name: stored.load(name).item() for name in stored.tensors if name.endswith(".input_scale")}


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_to_nearest(family: str, sources: dict[str, Path], tmp_path: Path) -> None:
    result = job.run(job.prepare(sources[family], Recipe(format="w4afp8")), tmp_path / "out")
    assert any("input_scale" in note for note in result.notes)
    before, after = Checkpoint.open(sources[family]), Checkpoint.open(tmp_path / "out")
    dtypes = {
        name.rpartition(".")[2]: info.dtype for name, info in after.tensors.items() if "experts." in name
    }
    for module in describe(before.config, before.shapes).modules:
        weight = after.info(f"{module.name}.weight")
        if module.role is Role.EXPERT:
            parts = {name: after.load(name) for name in after.tensors if name.startswith(f"{module.name}.")}
            assert {
                name.rpartition(".")[2]: (part.dtype, tuple(part.shape)) for name, part in parts.items()
            } == {
                "weight": (torch.int8, (module.out_features, module.in_features // 2)),
                "weight_scale_inv": (torch.float32, (module.out_features, module.in_features // 128)),
                "input_scale": (torch.bfloat16, (1,)),
            }
            want = round_to_nearest(
                before.load_source(module.source), experts_scheme().weights.with_scale("bf16")
            )
            found = dequantize(decode(module.name, experts_scheme(), parts)).float()
            assert torch.equal(found, dequantize(want).float()), module.name
        elif module.role is Role.LINEAR:
            assert (weight.dtype, weight.shape) == ("F8_E4M3", module.shape)
        else:
            assert weight.dtype == before.info(f"{module.name}.weight").dtype, module.name
    assert dtypes["weight_scale_inv"] == "F32"
    assert set(input_scales(tmp_path / "out").values()) == {1.0}


@pytest.mark.parametrize("family", FAMILIES)
def test_calibrated(family: str, sources: dict[str, Path], tmp_path: Path) -> None:
    recipe = Recipe(format="w4afp8", algorithm="awq+gptq")
    quantize(sources[family], tmp_path / "out", recipe)
    assert verify(tmp_path / "out", against=sources[family]).passed
    groups: dict[tuple[str, bool], set[float]] = {}
    for name, scale in input_scales(tmp_path / "out").items():
        mixture, _, rest = name.partition(".experts.")
        groups.setdefault((mixture, "down" in rest or "w2" in rest), set()).add(scale)
    # One for what all experts of a block read, one for what their last projections read: SGLang keeps no more.
    assert len(groups) == (2 if family == "deepseek_v3" else 4)
    assert all(len(scales) == 1 for scales in groups.values())
    assert all(1e-3 < scale < 0.2 for scales in groups.values() for scale in scales)
    model, _ = halfbyte.load(tmp_path / "out", dtype=torch.float32)
    plain, _ = halfbyte.load(sources[family], dtype=torch.float32)
    with torch.inference_mode():
        found, exact = model(IDS).logits, plain(IDS).logits
    assert (found - exact).norm() < 0.6 * exact.norm()


def test_input_scales_are_of_the_largest_input(sources: dict[str, Path], tmp_path: Path) -> None:
    """The first block's experts read what the source's do: nothing before them is rounded but its attention."""
    quantize(sources["mixtral"], tmp_path / "out", Recipe(format="w4afp8", algorithm="gptq"))
    scale = input_scales(tmp_path / "out")["model.layers.0.block_sparse_moe.experts.0.w1.input_scale"]
    model, _ = halfbyte.load(sources["mixtral"])
    largest = []
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.register_forward_pre_hook(lambda _, inputs: largest.append(inputs[0].abs().max().item()))
    with torch.inference_mode():
        for sample in samples().samples:
            model(sample.ids[None])
    # Other batches round the attention another way, by a step of bf16.
    assert 448 * scale == pytest.approx(max(largest), rel=0.02)


def test_a_stopped_run_goes_on_to_the_same_bytes(sources: dict[str, Path], tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(state: object) -> None:
        if getattr(state, "block", 0) == 1:
            raise StoppedError

    recipe, source = Recipe(format="w4afp8", algorithm="awq+gptq"), sources["qwen3_moe"]
    quantize(source, tmp_path / "whole", recipe)
    with pytest.raises(StoppedError):
        quantize(source, tmp_path / "out", recipe, on_progress=stop)
    quantize(source, tmp_path / "out", recipe)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_widths_that_groups_do_not_divide_are_said_before_work_starts(tmp_path: Path) -> None:
    source = tiny_model("qwen3_moe", tmp_path / "narrow", moe_intermediate_size=64)
    with pytest.raises(
        HalfbyteError, match=r"int4 in groups of 64 is not what w4afp8 holds; accepted: .* 128"
    ):
        job.prepare(source, Recipe(format="w4afp8"))
    dense = tiny_model("llama", tmp_path / "dense")
    with pytest.raises(HalfbyteError, match="no experts; accepted: a mixture"):
        job.prepare(dense, Recipe(format="w4afp8"))
