from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import halfbyte
from halfbyte.algorithms.output_error import output_error
from halfbyte.calibration.blocks import BlockModel
from halfbyte.checkpoint.output_directory import OutputDirectory
from halfbyte.checkpoint.quantized_weight import decode
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.vllm_scales import settle, vllm_dequantize
from halfbyte.models import folding
from halfbyte.quantization import walk
from halfbyte.quantization.report import REPORT_FILE
from halfbyte.quantization.walk import Progress
from halfbyte.recipe import Recipe
from halfbyte.schemes import PRESETS
from tests.quantization.calibrated_runs import contents, quantize, samples
from tests.tiny import FAMILIES, VOCAB_SIZE, tiny_model

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "llama4_text", "deepseek_v3")


class StoppedError(Exception):
    """Ends a run in the middle."""


def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    model, _ = halfbyte.load(path, dtype=torch.float32)
    with torch.no_grad():
        return model(ids).logits.float()


def distance(found: torch.Tensor, meant: torch.Tensor) -> float:
    return float((found - meant).norm() / meant.norm())


def report_of(out: Path) -> Any:
    return json.loads((out / REPORT_FILE).read_text())


def seen_ids() -> torch.Tensor:
    return samples().samples[-1].ids[None]


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_change_next_to_nothing(family: str, tmp_path: Path) -> None:
    """Scales that were moved without one of their readers, routers included, would change everything."""
    source = tiny_model(family, tmp_path, dtype=torch.float32)
    quantize(source, tmp_path / "out", Recipe(scheme="w8a16", algorithm="awq+gptq"))
    meant, found = logits(source, seen_ids()), logits(tmp_path / "out", seen_ids())
    if family in MIXTURES:  # a token whose experts are nearly level may choose others
        errors = (found - meant).norm(dim=-1) / meant.norm(dim=-1)
        assert float(errors.median()) < 0.02
    else:
        assert distance(found, meant) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("scheme", ["w4a8", "w4a8-int8", "w4a16-asym"])
def test_a_gpu_does_what_a_cpu_does(family: str, scheme: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path, dtype=torch.float32)
    recipe = Recipe(scheme=scheme, algorithm="awq+gptq")
    quantize(source, tmp_path / "cpu", recipe)
    quantize(source, tmp_path / "gpu", recipe, device="cuda")
    on_cpu, on_gpu = (
        [module for block in report_of(tmp_path / place)["blocks"] for module in block["modules"]]
        for place in ("cpu", "gpu")
    )
    for one, other in zip(on_cpu, on_gpu, strict=True):
        assert one["module"] == other["module"]
        assert one["fallback"] == other["fallback"]
        assert other["error_rtn"] == pytest.approx(one["error_rtn"], rel=0.05), one["module"]
        assert other["error"] == pytest.approx(one["error"], rel=0.1), one["module"]
    # Not from each other: where a router's choice is close, a rounding tells another expert.
    meant = logits(source, seen_ids())
    lost_on_cpu, lost_on_gpu = (
        distance(logits(tmp_path / place, seen_ids()), meant) for place in ("cpu", "gpu")
    )
    assert lost_on_gpu == pytest.approx(lost_on_cpu, rel=0.3)


def test_partners_keep_one_outer_scale_whoever_is_clipped(tmp_path: Path) -> None:
    """The largest weight of all is where inputs are small, so that its range is narrowed."""
    source = tiny_model("llama", tmp_path, dtype=torch.float32)
    tensors = load_file(source / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.input_layernorm.weight"][5] = 1e-3
        key = tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]
        key[3, 5] = 1.5 * key.abs().max()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    quantize(source, tmp_path / "out", Recipe(scheme="nvfp4", algorithm="gptq", clip="output"))
    written = Checkpoint.open(tmp_path / "out")
    outer = [
        written.load(f"model.layers.0.self_attn.{leaf}_proj.weight_global_scale") for leaf in ("q", "k", "v")
    ]
    assert torch.equal(outer[0], outer[1])
    assert torch.equal(outer[1], outer[2])


def test_a_gpu_reads_the_next_block_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on a CPU that says it is none; what cannot be read ahead is read in its turn."""
    source = tiny_model("llama", tmp_path, dtype=torch.float32)
    quantize(source, tmp_path / "plain")
    ahead: list[int] = []
    load = BlockModel.load

    def remember(self: BlockModel, index: int) -> None:
        ahead.append(index)
        if len(ahead) > 1:
            raise HalfbyteError("not now")
        load(self, index)

    monkeypatch.setattr(BlockModel, "load", remember)
    monkeypatch.setattr(BlockModel, "device", torch.device("meta"))
    monkeypatch.setattr(walk, "_TOKENS_TOGETHER", 1)
    quantize(source, tmp_path / "ahead")
    assert ahead == [1]
    quantize(source, tmp_path / "failing")
    assert ahead == [1, 1]
    assert contents(tmp_path / "ahead") == contents(tmp_path / "plain") == contents(tmp_path / "failing")


@pytest.mark.parametrize(("family", "masked"), [("llama", 0), *((family, 7) for family in FAMILIES)])
def test_a_gpu_runs_samples_together(
    family: str, masked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here on a CPU that says it is none: what is found differs by roundings."""
    source = tiny_model(family, tmp_path, dtype=torch.float32)
    data = samples((48, 64, 48, 48), masked=masked)
    quantize(source, tmp_path / "alone", data=data)
    monkeypatch.setattr(BlockModel, "device", torch.device("meta"))
    quantize(source, tmp_path / "together", data=data)
    alone, together = (
        [module for block in report_of(tmp_path / place)["blocks"] for module in block["modules"]]
        for place in ("alone", "together")
    )
    for one, other in zip(alone, together, strict=True):
        assert (one["module"], one["tokens"]) == (other["module"], other["tokens"])
        assert other["error_rtn"] == pytest.approx(one["error_rtn"], rel=1e-2), one["module"]
    # Of the first block, whose inputs are the same.
    first, second = (
        report_of(tmp_path / place)["blocks"][0]["routed_tokens"] for place in ("alone", "together")
    )
    assert first == second


def test_layers_with_one_input_scale_it_in_one_way(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    recipe = Recipe(
        algorithm="awq+gptq", targets={"*.k_proj": {"scheme": "w4a8", "algorithm": "smoothquant+gptq"}}
    )
    with pytest.raises(
        HalfbyteError,
        match=r"k_proj read the same input, which awq and smoothquant would each scale; accepted",
    ):
        quantize(source, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("algorithm", ["rotation", "rotation+awq+gptq"])
def test_a_rotated_model_is_the_same_model(family: str, algorithm: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path, dtype=torch.float32)
    recipe = Recipe(scheme="w8a16", algorithm=algorithm)
    quantize(source, tmp_path / "out", recipe)
    errors = logits(tmp_path / "out", seen_ids()) - (meant := logits(source, seen_ids()))
    assert float((errors.norm(dim=-1) / meant.norm(dim=-1)).median()) < 0.03
    rotated = Checkpoint.open(tmp_path / "out")
    assert "lm_head.weight" in rotated.tensors
    assert rotated.config["tie_word_embeddings"] is False
    name = "model.layers.0.self_attn.o_proj"
    assert distance(_decoded(rotated, name), Checkpoint.open(source).load(f"{name}.weight")) > 1


def _decoded(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    stored = {
        tensor: checkpoint.load(tensor) for tensor in checkpoint.tensors if tensor.startswith(f"{name}.")
    }
    return dequantize(decode(name, PRESETS["w8a16"], stored))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_four_bits_move_the_outputs_less_than_round_to_nearest(family: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path)
    quantize(source, tmp_path / "out")
    report = report_of(tmp_path / "out")
    modules = [module for block in report["blocks"] for module in block["modules"]]
    assert (
        len(modules) == report["totals"]["modules"] == 14 if family in ("llama", "gemma3_text") else modules
    )
    for module in modules:
        assert module["error"] < 0.75 * module["error_rtn"], module["module"]
    assert report["totals"]["error"] < 0.6 * report["totals"]["error_rtn"]


def test_what_is_reported_is_what_was_written(tmp_path: Path) -> None:
    """The first block's inputs are the original's, so that its layers can be held against a plain forward pass."""
    source = tiny_model("llama", tmp_path, dtype=torch.float32)
    quantize(source, tmp_path / "out", Recipe(scheme="w4a16", algorithm="gptq", clip="none"))
    written, _ = halfbyte.load(tmp_path / "out", dtype=torch.float32)
    original = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    layer = original.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].double()))
    with torch.no_grad():
        for sample in samples().samples:
            original(sample.ids[None])
    inputs = torch.cat(seen)
    weight = layer.weight.detach().double()
    decoded = written.model.layers[0].self_attn.q_proj(torch.eye(128)).detach().T.double()
    module = next(
        m for m in report_of(tmp_path / "out")["blocks"][0]["modules"] if m["module"].endswith("q_proj")
    )
    assert module["tokens"] == len(inputs)
    expected = (inputs @ (decoded - weight).T).norm() / (inputs @ weight.T).norm()
    assert module["error"] == pytest.approx(float(expected), rel=1e-3)
    assert module["scheme"] == "w4a16"
    assert module["group_size"] == 128
    assert module["damping"] == 0.01


def test_masked_tokens_enter_no_statistic(tmp_path: Path) -> None:
    source = tiny_model("qwen3_moe", tmp_path)
    quantize(source, tmp_path / "out", data=samples(masked=10))
    report = report_of(tmp_path / "out")
    assert report["data"]["masked"] == {"template": 40}
    for block in report["blocks"]:
        assert {module["tokens"] for module in block["modules"]} == {200}
        (routed,) = block["routed_tokens"].values()
        assert sum(routed) == 2 * 200


def test_nothing_else_is_touched_without_scaling(tmp_path: Path) -> None:
    source = tiny_model("mixtral", tmp_path)
    quantize(source, tmp_path / "out", Recipe(algorithm="gptq"))
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "out")
    kept = [name for name in before.tensors if name in after.tensors]
    assert len(kept) == 9
    for name in kept:
        assert torch.equal(before.load(name), after.load(name)), name


@pytest.mark.parametrize("activations", ["memory", "disk"])
def test_the_same_run_gives_the_same_bytes(activations: str, tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    quantize(source, tmp_path / "one")
    quantize(source, tmp_path / "two", activations=activations)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("steps", [1, 7, 13, 30])
def test_a_killed_run_goes_on_to_the_same_bytes(steps: int, tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path, num_hidden_layers=3)
    quantize(source, tmp_path / "whole")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.quantization.calibrated_runs", str(source), str(tmp_path / "killed")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reached = ""
    for _ in range(steps):
        reached = process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed").exists()
    begun: list[str] = []
    result = quantize(
        source, tmp_path / "killed", on_progress=lambda state: begun.append(f"{state.block} {state.doing}")
    )
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    if int(reached.split()[0]) > 1:  # what was finished is passed through, not done again
        assert any("resuming" in note for note in result.notes)
        assert "1 observing" not in begun
        assert "1 running" in begun


def stopped(source: Path, out: Path, block: int, **options: Any) -> None:
    """A run that ends while ``block`` (from one) is observed."""

    def stop(state: Progress) -> None:
        if state.block == block:
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize(source, out, on_progress=stop, **options)


@pytest.mark.parametrize(
    ("recipe", "data"),
    [
        (Recipe(algorithm="gptq"), None),
        (Recipe(algorithm="awq+gptq", group_size=64), None),
        (None, samples(seed=1)),
    ],
    ids=["algorithm", "group size", "data"],
)
def test_another_run_loses_nothing_of_an_unfinished_one(
    recipe: Recipe | None, data: Any, tmp_path: Path
) -> None:
    source = tiny_model("llama", tmp_path)
    stopped(source, tmp_path / "out", block=2)
    before = contents(tmp_path / "out.partial")
    with pytest.raises(HalfbyteError, match=r"out\.partial: holds finished work of another") as caught:
        quantize(source, tmp_path / "out", **({"recipe": recipe} if recipe else {}), data=data)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path / "out.partial") == before
    quantize(source, tmp_path / "out")
    quantize(source, tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_shard_that_vanishes_stops_with_one_line(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    shard = source / "model.safetensors"
    kept = shard.read_bytes()

    def vanish(state: Progress) -> None:
        if state.block == 1 and state.doing == "running":
            shard.unlink(missing_ok=True)

    stamp = shard.stat()
    with pytest.raises(HalfbyteError, match=r"model\.safetensors: cannot be read \(No such file"):
        quantize(source, tmp_path / "out", on_progress=vanish)
    shard.write_bytes(kept)
    os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    result = quantize(source, tmp_path / "out")
    assert any("resuming" in note for note in result.notes)
    quantize(source, tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_full_disk_keeps_finished_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("llama", tmp_path)
    write = OutputDirectory.write_notes

    def full(self: OutputDirectory, shard: str, content: Any) -> None:
        if "layers.1" in json.dumps(content):
            raise OSError(28, "No space left on device", str(self.partial / shard))
        write(self, shard, content)

    monkeypatch.setattr(OutputDirectory, "write_notes", full)
    with pytest.raises(
        HalfbyteError, match=r"cannot be written \(No space left on device\); finished shards stay"
    ):
        quantize(source, tmp_path / "out")
    monkeypatch.undo()
    result = quantize(source, tmp_path / "out")
    assert any("resuming" in note for note in result.notes)
    quantize(source, tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_weight_that_is_not_finite_is_named_at_once(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.inf
    model.save_pretrained(source)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1"):
        quantize(source, tmp_path / "out")


def test_few_tokens_fall_back_to_round_to_nearest_by_name(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    result = quantize(source, tmp_path / "out", data=samples((40,)))
    report = report_of(tmp_path / "out")
    assert len(report["totals"]["fallbacks"]) == 14
    assert any("q_proj: rounded to nearest (saw 40 tokens, fewer than 64)" in note for note in result.notes)


def test_a_family_whose_wiring_is_not_known_is_quantized_without_scaling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("llama", tmp_path)
    monkeypatch.setattr(folding, "wiring_of", lambda config: None)
    result = quantize(source, tmp_path / "out")
    assert any(
        "14 modules keep the scale of their inputs: what its inputs come from" in n for n in result.notes
    )
    modules = [module for block in report_of(tmp_path / "out")["blocks"] for module in block["modules"]]
    assert all(module["scaling"] is None and module["error"] < module["error_rtn"] for module in modules)


def test_progress_rises_to_the_end(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    states: list[Progress] = []
    quantize(source, tmp_path / "out", on_progress=states.append)
    shares = [state.done for state in states]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert {state.doing for state in states} == {"observing", "quantizing", "running", "written"}
    assert len({state.module for state in states} - {None}) == 14
    assert all(state.blocks == 2 for state in states)


def test_targets_have_methods_of_their_own(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    recipe = Recipe(
        algorithm="rtn",
        targets={"*.down_proj": {"algorithm": "gptq"}, "lm_head": {"scheme": "w8a16", "algorithm": "rtn"}},
    )
    quantize(source, tmp_path / "out", recipe)
    methods = {
        m["module"].split(".")[-1]: m["method"]
        for b in report_of(tmp_path / "out")["blocks"]
        for m in b["modules"]
    }
    assert methods["down_proj"] == "gptq clip output"
    assert methods["q_proj"] == "rtn"
    assert logits(tmp_path / "out", torch.arange(9)[None]).shape == (1, 9, VOCAB_SIZE)


@pytest.mark.parametrize(("clip", "left"), [("mse", "mse"), (None, "none")])
def test_what_lies_outside_the_blocks_is_rounded_to_nearest_and_said(
    clip: Any, left: Any, tmp_path: Path
) -> None:
    source = tiny_model("llama", tmp_path)
    recipe = Recipe(algorithm="gptq", clip=clip, targets={"lm_head": "w4a16"})
    result = quantize(source, tmp_path / "out", recipe)
    written = Checkpoint.open(tmp_path / "out")
    stored = {name: written.load(name) for name in written.tensors if name.startswith("lm_head.")}
    plain = Recipe(scheme="none", clip=left, targets={"lm_head": "w4a16"})
    halfbyte.quantize(source, tmp_path / "plain", recipe=plain)
    nearest = Checkpoint.open(tmp_path / "plain")
    for name, tensor in stored.items():
        assert torch.equal(tensor, nearest.load(name))
    (note,) = [note for note in result.notes if note.startswith("lm_head:")]
    assert note.startswith(
        f"lm_head: rounded to nearest with clip {left} instead of gptq clip {clip or 'output'}: it lies outside the"
    )
    assert note in report_of(tmp_path / "out")["notes"]


def blocks_of(out: Path) -> dict[str, dict[str, bytes]]:
    """Block -> tensor -> bytes, of blocks by their number and the rest."""
    checkpoint = Checkpoint.open(out)
    found: dict[str, dict[str, bytes]] = {}
    for name in checkpoint.tensors:
        block = name.split(".")[2] if ".layers." in name else "rest"
        found.setdefault(block, {})[name] = checkpoint.load(name).view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize("unfinished", [False, True])
def test_chosen_layers_are_redone_and_no_others(unfinished: bool, tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path, num_hidden_layers=3)
    quantize(source, tmp_path / "whole")
    if unfinished:
        stopped(source, tmp_path / "out", block=3)
    else:
        shutil.copytree(tmp_path / "whole", tmp_path / "out")
    recipe = Recipe(
        algorithm="awq+gptq", targets={"re:.*layers\\.1\\..*": {"algorithm": "gptq", "clip": "mse"}}
    )
    result = quantize(source, tmp_path / "out", recipe, redo=["layers.1.*"])
    assert any(note.startswith("redoing ") for note in result.notes)
    before, after = blocks_of(tmp_path / "whole"), blocks_of(tmp_path / "out")
    same = {block for block in before if before[block] == after[block]}
    assert same == ({"rest", "0"} if unfinished else {"rest", "0", "2"})
    report = report_of(tmp_path / "out")
    methods = [{module["method"] for module in block["modules"]} for block in report["blocks"]]
    assert methods == [{"awq+gptq clip output"}, {"gptq clip mse"}, {"awq+gptq clip output"}]
    halfbyte.load(tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_redo_that_means_nothing(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    quantize(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(HalfbyteError, match=r"--redo 'layers\.9\.\*' means no quantized module"):
        quantize(source, tmp_path / "out", redo=["layers.9.*"])
    assert contents(tmp_path / "out") == before


def test_a_target_is_what_its_kernel_makes_of_the_weights(tmp_path: Path) -> None:
    """Scales survive vLLM's loading, and codes are chosen for what its kernel makes of them."""
    source = tiny_model("llama", tmp_path)
    quantize(source, tmp_path / "vllm", Recipe(algorithm="gptq", target="vllm"))
    quantize(source, tmp_path / "exact", Recipe(algorithm="gptq"))
    original = Checkpoint.open(source)
    moments: dict[str, torch.Tensor] = {}
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for leaf in ("q_proj", "o_proj"):
        seen: list[torch.Tensor] = []
        module = model.model.layers[0].self_attn.get_submodule(leaf)
        hook = module.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0][0]))
        with torch.no_grad():
            for sample in samples().samples:
                model(sample.ids[None])
        hook.remove()
        moments[leaf] = torch.cat(seen).T @ torch.cat(seen)
    scheme = PRESETS["w4a8"]
    for leaf, moment in moments.items():
        name = f"model.layers.0.self_attn.{leaf}"
        weight = original.load(f"{name}.weight").float()
        errors = {}
        for target in ("vllm", "exact"):
            written = Checkpoint.open(tmp_path / target)
            stored = {n: written.load(n) for n in written.tensors if n.startswith(f"{name}.")}
            q = decode(name, scheme, stored)
            errors[target] = output_error(weight, vllm_dequantize(q), moment)
            assert torch.equal(settle(q.scales), q.scales) == (target == "vllm")
        assert errors["vllm"] < errors["exact"]


def test_vllm_takes_groups_of_128_only(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    with pytest.raises(
        HalfbyteError, match=r"target vllm takes symmetric int4 in groups of 128 .* groups of 64"
    ):
        quantize(source, tmp_path / "out", Recipe(algorithm="gptq", target="vllm", group_size=64))
    assert not (tmp_path / "out.partial").exists()


def test_without_data_for_vllm_too(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    halfbyte.quantize(source, tmp_path / "out", recipe=Recipe(target="vllm", clip="mse"))
    written = Checkpoint.open(tmp_path / "out")
    name = "model.layers.1.mlp.up_proj"
    q = decode(
        name, PRESETS["w4a8"], {n: written.load(n) for n in written.tensors if n.startswith(f"{name}.")}
    )
    assert torch.equal(settle(q.scales), q.scales)
    weight = Checkpoint.open(source).load(f"{name}.weight").float()
    assert float((vllm_dequantize(q) - weight).norm() / weight.norm()) < 0.12


def test_two_levels_are_searched_for_the_outputs(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    quantize(source, tmp_path / "out", Recipe(scheme="w4a8-int8", algorithm="gptq"))
    quantize(source, tmp_path / "plain", Recipe(scheme="w4a8-int8", algorithm="gptq", clip="none"))
    errors = [report_of(tmp_path / run)["totals"] for run in ("out", "plain")]
    assert errors[0]["error"] < errors[1]["error"] < errors[1]["error_rtn"]
