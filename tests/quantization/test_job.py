from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.algorithms.clip import clip_mse
from halfbyte.algorithms.rtn import rtn
from halfbyte.audit.verify import verify
from halfbyte.checkpoint.detect import detect
from halfbyte.checkpoint.quantized_weight import decode
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.formats.quantize import dequantize
from halfbyte.models.describe import describe
from halfbyte.quantization import job
from halfbyte.quantization.plan import Copy
from halfbyte.recipe import Recipe
from halfbyte.schemes import PRESETS
from tests.tiny import tiny_model


def _quantize(
    source: Path, out: Path, recipe: Recipe | None = None, **options: object
) -> job.QuantizationResult:
    return job.run(job.prepare(source, recipe or Recipe()), out, **options)  # type: ignore[arg-type]


def _bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def _assert_holds_what_the_algorithm_gives(source: Path, out: Path, clip: str = "none") -> int:
    """Every quantized module decodes to the algorithm's result on the source weight; the rest is equal bytes."""
    before, after = Checkpoint.open(source), Checkpoint.open(out)
    stored = detect(after).stored
    assert stored is not None
    layout = describe(before.config, before.shapes)
    consumed: set[str] = set()
    quantized = 0
    for module in layout.modules:
        scheme = stored.scheme_for(module.name, module.role)
        if scheme is None:
            continue
        quantized += 1
        consumed.add(module.source.tensor)
        tensors = {n: after.load(n) for n in after.tensors if n.startswith(module.name + ".weight")}
        partners = [m for m in layout.modules if module.fused_group and m.fused_group == module.fused_group]
        expected = (clip_mse if clip == "mse" else rtn)(
            before.load_source(module.source),
            scheme.weights.with_scale(before.model_dtype),
            elsewhere=max((float(before.load_source(m.source).abs().max()) for m in partners), default=0.0),
        )
        assert torch.equal(dequantize(decode(module.name, scheme, tensors)), dequantize(expected)), (
            module.name
        )
    for name in before.tensors:
        if name not in consumed:
            assert torch.equal(before.load(name).view(torch.uint8), after.load(name).view(torch.uint8)), name
    return quantized


@pytest.mark.parametrize("scheme", PRESETS)
def test_every_preset(scheme: str, tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    result = _quantize(source, tmp_path / "out", Recipe(scheme=scheme))
    assert result.modules == 14
    assert _assert_holds_what_the_algorithm_gives(source, tmp_path / "out") == 14


@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "mixtral", "qwen3_moe", "olmoe",
     "deepseek_v3", "llama4_text"],
)  # fmt: skip
def test_every_family(family: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path)
    result = _quantize(source, tmp_path / "out")
    assert result.modules == _assert_holds_what_the_algorithm_gives(source, tmp_path / "out") > 0


def test_fused_partners_share_their_global_scale(tmp_path: Path) -> None:
    """An engine keeps one scale for q, k and v; a v twice as large must not lose its upper half."""
    source = tiny_model("llama", tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 2.14
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    _quantize(source, tmp_path / "out", Recipe(scheme="nvfp4"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    names = "qkv"
    for layer in (0, 1):
        scales = {
            written[f"model.layers.{layer}.self_attn.{n}_proj.weight_global_scale"].item() for n in names
        }
        assert len(scales) == 1
        largest = max(
            tensors[f"model.layers.{layer}.self_attn.{n}_proj.weight"].abs().max().item() for n in names
        )
        assert scales.pop() == pytest.approx(448 * 6 / largest, rel=1e-6)


def test_clip_of_the_recipe_is_used(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    _quantize(source, tmp_path / "out", Recipe(clip="mse"))
    _assert_holds_what_the_algorithm_gives(source, tmp_path / "out", clip="mse")


def test_extra_tensors_survive(tmp_path: Path) -> None:
    """A multi-token-prediction head is in no transformers model, and must be there afterwards."""
    source = tiny_model("llama", tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors["mtp.head.weight"] = torch.randn(7, 5, dtype=torch.float32)
    tensors["mtp.counts"] = torch.arange(3)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    _quantize(source, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["mtp.head.weight"], tensors["mtp.head.weight"])
    assert torch.equal(written["mtp.counts"], tensors["mtp.counts"])


def test_config_keeps_what_it_had(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    _quantize(source, tmp_path / "out")
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert after == before


def test_group_falls_back_and_says_so(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path, hidden_size=192, num_attention_heads=6, num_key_value_heads=6)
    result = _quantize(source, tmp_path / "out")
    assert any("in_features 192: group 64 instead of 128" in note for note in result.notes)
    assert Checkpoint.open(tmp_path / "out").shapes["model.layers.0.self_attn.q_proj.weight_scale"] == (
        192,
        3,
    )


def test_nan_weight_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"model.safetensors: model.layers.1.mlp.up_proj.weight"):
        _quantize(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"llama"}


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    _quantize(source, tmp_path / "once")
    with pytest.raises(HalfbyteError, match="quantized already"):
        job.prepare(tmp_path / "once", Recipe())


def test_nothing_to_quantize_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match="nothing would be quantized"):
        job.prepare(tiny_model("llama", tmp_path), Recipe(ignore=("*",)))


def test_some_experts_of_a_fused_tensor_are_refused(tmp_path: Path) -> None:
    source = tiny_model("llama4_text", tmp_path)
    checkpoint = Checkpoint.open(source)
    fused = [m for m in describe(checkpoint.config, checkpoint.shapes).modules if m.source.expert is not None]
    with pytest.raises(HalfbyteError, match="all of a fused tensor's experts quantized, or none"):
        job.prepare(source, Recipe(ignore=(fused[0].name,)))


def test_progress_adds_up_to_the_source(tmp_path: Path) -> None:
    for family in ("llama", "llama4_text"):
        plan = job.prepare(tiny_model(family, tmp_path), Recipe())
        done: list[float] = []
        job.run(plan, tmp_path / f"{family}-out", progress=lambda step, what: done.append(step))  # noqa: B023
        assert sum(done) == pytest.approx(job.source_bytes(plan))


def test_output_exists(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    _quantize(source, tmp_path / "out")
    first = _bytes(tmp_path / "out")
    with pytest.raises(HalfbyteError, match="--overwrite"):
        _quantize(source, tmp_path / "out", Recipe(scheme="fp8"))
    assert _bytes(tmp_path / "out") == first
    _quantize(source, tmp_path / "out", Recipe(scheme="fp8"), overwrite=True)
    assert _bytes(tmp_path / "out")["model.safetensors"] != first["model.safetensors"]


def test_source_is_no_output(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    before = _bytes(source)
    with pytest.raises(HalfbyteError, match="is or holds the source"):
        _quantize(source, tmp_path / "." / "llama", overwrite=True)
    assert _bytes(source) == before


def test_output_does_not_hold_the_source(tmp_path: Path) -> None:
    """Replacing a directory that has the source in it would delete the source at the end."""
    outer = tiny_model("llama", tmp_path)
    inner = outer / "inner"
    shutil.copytree(outer, inner)
    with pytest.raises(HalfbyteError, match="is or holds the source"):
        _quantize(inner, outer, overwrite=True)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in inner.iterdir():
        (linked / file.name).symlink_to(file)
    with pytest.raises(HalfbyteError, match="is or holds the source"):
        _quantize(linked, outer, overwrite=True)


def test_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    out = tmp_path / "out"

    def appear(done: float, what: str) -> None:
        out.mkdir(exist_ok=True)
        (out / "notes.txt").write_text("precious")

    with pytest.raises(HalfbyteError, match="exists"):
        _quantize(source, out, progress=appear)
    assert (out / "notes.txt").read_text() == "precious"


def test_output_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("llama", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(HalfbyteError, match="names no directory"):
        _quantize(source, Path(""))


def test_weight_of_integers_is_named(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HalfbyteError, match=f"model.safetensors: {name}: .*int8"):
        _quantize(source, tmp_path / "out")


_SLOW_RUN = """
import sys, time
from halfbyte.quantization import job
from halfbyte.recipe import Recipe
def progress(done, what):
    print(what, flush=True)
    time.sleep(0.02)
job.run(job.prepare(sys.argv[1], Recipe()), sys.argv[2], shard_bytes=100_000, progress=progress)
"""


@pytest.mark.parametrize("after", [1, 9, 17])
def test_killed_run_resumes_to_the_same_bytes(after: int, tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    _quantize(source, tmp_path / "whole", shard_bytes=100_000)
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW_RUN, str(source), str(tmp_path / "killed")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(after):
        assert process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed").exists(), "half a model must not look like a model"
    result = _quantize(source, tmp_path / "killed", shard_bytes=100_000)
    assert _bytes(tmp_path / "killed") == _bytes(tmp_path / "whole")
    if after >= 9:
        assert any("resuming" in note for note in result.notes)


def test_changed_recipe_does_not_resume(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW_RUN, str(source), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(17):
        process.stdout.readline()
    process.kill()
    process.communicate()
    time.sleep(0.01)
    recipe = Recipe(clip="mse")
    result = _quantize(source, tmp_path / "out", recipe, shard_bytes=100_000)
    assert any("discarded" in note for note in result.notes)
    _quantize(source, tmp_path / "fresh", recipe, shard_bytes=100_000)
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "fresh")


def test_plan_is_in_source_order(tmp_path: Path) -> None:
    """Sequential reads: each step's tensor follows the last one's in the file."""
    plan = job.prepare(tiny_model("mixtral", tmp_path), Recipe())
    order = list(plan.checkpoint.tensors)
    positions = [
        order.index(step.tensor if isinstance(step, Copy) else step.module.source.tensor)
        for step in plan.steps
    ]
    assert positions == sorted(positions)


def test_a_rotated_model_says_so(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    _quantize(source, tmp_path / "out", Recipe(algorithm="rotation"))
    report = json.loads((tmp_path / "out/quantization_report.json").read_text())
    assert report["recipe"]["algorithm"] == "rotation"
    found = verify(tmp_path / "out", against=source)
    assert [finding.rule for finding in found.findings if finding.level == "error"] == []
    assert any(finding.rule == "rotation" for finding in found.findings)
    _quantize(source, tmp_path / "plain")
    assert not (tmp_path / "plain/quantization_report.json").exists()
