"""Mixtures in SGLang's w4afp8 run as their weights and their static input scales say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import halfbyte
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.engines.transformers.loading import load
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize
from halfbyte.layers.experts import QuantExperts
from halfbyte.layers.linear import QuantLinear
from tests.audit.tamper import change_config, change_tensor, drop
from tests.tiny import tiny_model

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")
IDS = torch.arange(3, 60).reshape(3, 19)
EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("w4afp8")

    def make(family: str) -> Path:
        if not (root / family / "out").exists():
            source = tiny_model(family, root / family)
            halfbyte.quantize(source, root / family / "out", recipe={"scheme": "w4a8", "format": "w4afp8"})
        return root / family / "out"

    return make


def scaled(path: Path, to: Path, scale: Callable[[str], float]) -> Path:
    """A copy whose input scales are what ``scale`` says for each tensor."""
    shutil.copytree(path, to)
    tensors = load_file(to / "model.safetensors")
    for name in tensors:
        if name.endswith(".input_scale"):
            tensors[name] = torch.tensor([scale(name)], dtype=torch.bfloat16)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def seen(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What a layer sees of its inputs: divided, rounded to E4M3 with its largest number as the limit, multiplied."""
    return (x.double() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale


def logits(path: Path) -> torch.Tensor:
    model, _ = load(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_computes_its_definition(
    family: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    scales = {"gate_proj": 0.75, "w1": 0.75, "up_proj": 0.75, "w3": 0.75, "down_proj": 0.01, "w2": 0.01}
    path = scaled(written(family), tmp_path / "scaled", lambda name: scales[name.split(".")[-2]])
    model, _ = load(path, dtype=torch.float32)
    experts = [module for module in model.modules() if isinstance(module, QuantExperts)]
    assert len(experts) == (1 if family == "deepseek_v3" else 2)
    for mixture in experts:
        for layer in (module for module in mixture.modules() if isinstance(module, QuantLinear)):
            assert layer.unpack().format.element == "int4"
            x = 5 * torch.randn(7, layer.in_features)
            scale = torch.tensor(scales[layer.name.rpartition(".")[2]]).bfloat16().item()
            want = seen(x, scale) @ dequantize(layer.unpack()).double().T
            torch.testing.assert_close(layer(x).double(), want, rtol=1e-4, atol=1e-4)
            assert (want - x.double() @ dequantize(layer.unpack()).double().T).norm() > 1e-3 * want.norm()
    names = {id(module) for mixture in experts for module in mixture.modules()}
    dense = [m for m in model.modules() if isinstance(m, QuantLinear) and id(m) not in names]
    assert {layer.unpack().format.granularity for layer in dense} == {"block"}


def test_another_input_scale_is_another_model(written: Callable[[str], Path], tmp_path: Path) -> None:
    # Of a power of two nothing changes but what saturates or gets too small; others round inputs differently.
    path = written("qwen3_moe")
    one = logits(path)
    assert torch.equal(one, logits(scaled(path, tmp_path / "one", lambda _: 1.0)))
    for label, scale in (("rounding", 0.75), ("saturating", 2.0**-10)):
        other = logits(scaled(path, tmp_path / label, lambda _, scale=scale: scale))  # type: ignore[misc]
        assert (other - one).norm() > 1e-3 * one.norm(), label
    near, _ = load(scaled(path, tmp_path / "near", lambda _: 0.01))
    plain, _ = load(path.parent / "qwen3_moe")
    with torch.inference_mode():
        found, exact = near(IDS).logits.float(), plain(IDS).logits.float()
    assert (found - exact).norm() < 0.4 * exact.norm()


def test_an_input_scale_of_one_expert_is_that_experts(written: Callable[[str], Path], tmp_path: Path) -> None:
    def scale(name: str) -> float:
        return 0.02 if f"{EXPERT}.up_proj." in name else 1.0

    model, _ = load(scaled(written("qwen3_moe"), tmp_path / "one", scale), dtype=torch.float32)
    found = {
        layer.name: layer.static_input_scale.item()
        for layer in model.modules()
        if isinstance(layer, QuantLinear) and layer.static_input_scale is not None
    }
    assert found.pop(f"{EXPERT}.up_proj") == torch.tensor(0.02).bfloat16().item()
    assert set(found.values()) == {1.0}


@pytest.mark.parametrize("apart", [False, True])
def test_input_scales_named_after_shards(apart: bool, written: Callable[[str], Path], tmp_path: Path) -> None:
    """As DeepSeek's checkpoints in this form name them; there they lie in a file of their own."""
    path = scaled(
        written("deepseek_v3"), tmp_path / "beside", lambda name: 0.75 if "up_proj" in name else 0.25
    )
    shards = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    renamed = shutil.copytree(path, tmp_path / "renamed")
    weights, scales = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        *rest, projection, leaf = name.split(".")
        if leaf == "input_scale":
            scales[".".join([*rest, shards[projection], leaf])] = tensor
        else:
            weights[name] = tensor
    if apart:
        (renamed / "model.safetensors").unlink()
        files = {"model-00001-of-00001.safetensors": weights, "act_scales.safetensors": scales}
        for file, tensors in files.items():
            save_file(tensors, renamed / file, {"format": "pt"})
        index = {name: file for file, tensors in files.items() for name in tensors}
        (renamed / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
    else:
        save_file({**weights, **scales}, renamed / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(renamed), logits(path))
    model, _ = load(renamed)
    model.save_pretrained(tmp_path / "saved")
    ours, saved = Checkpoint.open(renamed), Checkpoint.open(tmp_path / "saved")
    assert set(saved.tensors) == set(ours.tensors)
    assert all(torch.equal(saved.load(name), ours.load(name)) for name in ours.tensors if "scale" in name)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_saving_gives_the_same_bytes(family: str, written: Callable[[str], Path], tmp_path: Path) -> None:
    path = scaled(written(family), tmp_path / "scaled", lambda _: 0.75)
    model, _ = load(path)
    model.save_pretrained(tmp_path / "saved")
    ours, saved = Checkpoint.open(path), Checkpoint.open(tmp_path / "saved")
    assert set(saved.tensors) == set(ours.tensors)
    for name, info in ours.tensors.items():
        assert (saved.info(name).dtype, saved.info(name).shape) == (info.dtype, info.shape), name
        assert torch.equal(ours.load(name).view(torch.uint8), saved.load(name).view(torch.uint8)), name
    assert saved.config["quantization_config"] == ours.config["quantization_config"]


def test_it_is_scored(written: Callable[[str], Path]) -> None:
    path = written("deepseek_v3")
    found = halfbyte.evaluate(path, path.parent / "deepseek_v3", context=64, windows=2)
    assert found.baseline is not None
    assert 0 < found.baseline.kl_mean < 0.5


# What is wrong with the files is said when they are loaded


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ("weight_scale_inv", f"{EXPERT}.up_proj: weight_scale_inv is missing"),
        ("input_scale", f"{EXPERT}.up_proj: its inputs have a static scale, but input_scale is missing"),
        ("weight", "up_proj of expert 2 of 4 is not in the checkpoint"),
    ],
)
def test_a_missing_tensor_is_named(
    leaf: str, words: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    path = shutil.copytree(written("qwen3_moe"), tmp_path / "out")
    drop(path, f"{EXPERT}.up_proj.{leaf}")
    with pytest.raises(HalfbyteError, match=words):
        load(path)


def test_a_missing_expert_is_named(written: Callable[[str], Path], tmp_path: Path) -> None:
    path = shutil.copytree(written("qwen3_moe"), tmp_path / "out")
    drop(path, f"{EXPERT}.")
    with pytest.raises(
        HalfbyteError, match=r"mlp\.experts: .*_proj of expert 2 of 4 is not in the checkpoint"
    ):
        load(path)


@pytest.mark.parametrize(
    ("leaf", "change", "words"),
    [
        ("weight", lambda t: t[:, :32], "64 inputs are no whole groups"),
        (
            "weight",
            lambda t: t[:64],
            r"weight_scale_inv: is F32 \[128, 1\], its scheme calls for F32 \[64, 1\]",
        ),
        ("weight", lambda t: t.float(), "its scheme calls for I8"),
        ("weight_scale_inv", lambda t: t.repeat(1, 2), r"is F32 \[128, 2\].* calls for F32 \[128, 1\]"),
        ("weight_scale_inv", lambda t: -t, "accepted: finite, not negative"),
        ("input_scale", lambda t: t * 0, "holds 0 at .*accepted: a positive finite number"),
    ],
)
def test_a_misfit_is_named(
    leaf: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    words: str,
    written: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    path = shutil.copytree(written("qwen3_moe"), tmp_path / "out")
    change_tensor(path, f"{EXPERT}.up_proj.{leaf}", change)
    with pytest.raises(HalfbyteError, match=words) as caught:
        load(path)
    assert EXPERT in str(caught.value)


def test_one_expert_in_another_scheme(written: Callable[[str], Path], tmp_path: Path) -> None:
    name = f"{EXPERT}.up_proj"
    fp8 = shutil.copytree(written("qwen3_moe"), tmp_path / "fp8")
    change_tensor(fp8, f"{name}.weight", lambda _: torch.ones(128, 128).to(torch.float8_e4m3fn))
    with pytest.raises(HalfbyteError, match=rf"{name}\.weight: is F8_E4M3 .* calls for I8"):
        load(fp8)
    plain = shutil.copytree(written("qwen3_moe"), tmp_path / "plain")
    change_tensor(plain, f"{name}.weight", lambda _: torch.ones(128, 128).bfloat16())
    for leaf in ("weight_scale_inv", "input_scale"):
        drop(plain, f"{name}.{leaf}")
    with pytest.raises(
        HalfbyteError,
        match=rf"{name}\.weight: is BF16 \[128, 128\]; accepted in experts of w4afp8: I8 \[128, 64\]",
    ):
        load(plain)


def test_a_config_that_does_not_say_it(written: Callable[[str], Path], tmp_path: Path) -> None:
    path = shutil.copytree(written("qwen3_moe"), tmp_path / "out")
    change_config(path, lambda config: config.pop("quantization_config"))
    with pytest.raises(HalfbyteError, match=r'"quant_method": "w4afp8".* makes it readable'):
        load(path)
