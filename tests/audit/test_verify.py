from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.audit.verification import Finding, Verification
from halfbyte.audit.verify import verify
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.schemes import PRESETS
from tests.audit.tamper import Q_PROJ, change, change_config, copied, drop, names, quantized, shards
from tests.tiny import tiny_model

Make = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]


def _errors(found: Verification, where: str) -> list[Finding]:
    """The errors, all of which must name ``where``."""
    assert not found.passed
    assert {finding.where for finding in found.errors} == {where}, found.errors
    return found.errors


@pytest.mark.parametrize("scheme", PRESETS)
def test_what_the_job_writes_passes(scheme: str, llama: Path, made: Make) -> None:
    found = verify(made(scheme), against=llama)
    assert [finding for finding in found.findings if finding.level != "ok"] == []
    assert len(found.weights) == 7
    assert found.untouched == 5
    # Uniform rounding of normal weights over a range of about 3 deviations; E4M3 has three bits of significand.
    fmt = PRESETS[scheme].weights
    bound = 0.04 if fmt.element == "e4m3" else 2.0**-fmt.bits * 2.5
    assert all(0 < weight.relative_error < bound for weight in found.weights)  # type: ignore[operator]
    assert found.schema is (None if scheme == "w4a8-int8" else True)


@pytest.mark.parametrize("clip", ["none", "mse"])
def test_clipped_ranges_are_still_rounding_to_nearest(clip: str, llama: Path, tmp_path: Path) -> None:
    from halfbyte.quantization import job
    from halfbyte.recipe import Recipe

    for scheme in ("w4a8", "w4a16-asym", "w4a8-int8", "nvfp4"):
        job.run(job.prepare(llama, Recipe(scheme=scheme, clip=clip)), tmp_path / scheme)
        assert verify(tmp_path / scheme, against=llama).passed


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "mixtral", "llama4_text", "phi3", "gemma2"])
def test_transposed_fused_and_interleaved_sources(family: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path, num_hidden_layers=2 if family == "llama4_text" else 1)
    found = verify(quantized(source, tmp_path / "out"), against=source)
    assert found.passed, found.errors
    assert found.weights
    assert all(0.05 < weight.relative_error < 0.2 for weight in found.weights)  # type: ignore[operator]
    assert found.untouched == len(Checkpoint.open(source).tensors) - len(
        Checkpoint.open(source).tensors.keys() - names(tmp_path / "out")
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_source_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path, dtype, num_hidden_layers=1)
    found = verify(quantized(source, tmp_path / "out"), against=source)
    assert found.passed, found.errors
    assert found.vllm is not None
    assert any("accepted: bf16" in finding.message for finding in found.vllm)


def test_without_a_source_structure_and_values_are_checked(made: Make) -> None:
    found = verify(made("w4a8"))
    assert found.passed
    assert all(weight.relative_error is None and weight.scale_min for weight in found.weights)


# Damage, one kind a test: each must be seen, and the tensor named -------------------------------------------------


def test_a_flipped_word(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")

    def flip(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight_packed"][17, 3] ^= -1

    change(path, flip)
    (error,) = _errors(verify(path, against=llama), f"{Q_PROJ}.weight_packed")
    assert "row 17, column 24" in error.message


@pytest.mark.parametrize(
    "scheme", ["w8a8-int8", "fp8", "mxfp4", "nvfp4", "w4a8-int8", "mxfp8", "fp8_per_block"]
)
def test_a_flipped_top_bit_in_every_form(scheme: str, llama: Path, fresh: Make) -> None:
    path = fresh(scheme)
    leaf = "weight" if f"{Q_PROJ}.weight" in names(path) else "weight_packed"

    def flip(tensors: Tensors) -> None:
        codes = tensors[f"{Q_PROJ}.{leaf}"].view(torch.uint8)
        codes[5, 2] ^= 0x80

    change(path, flip)
    (error,) = _errors(verify(path, against=llama), f"{Q_PROJ}.{leaf}")
    assert "row 5" in error.message


def test_two_tensors_swapped(llama: Path, fresh: Make) -> None:
    path, other = fresh("w4a8"), "model.layers.0.self_attn.o_proj"

    def swap(tensors: Tensors) -> None:
        for leaf in ("weight_packed", "weight_scale"):
            a, b = f"{Q_PROJ}.{leaf}", f"{other}.{leaf}"
            tensors[a], tensors[b] = tensors[b], tensors[a]

    change(path, swap)
    found = verify(path, against=llama)
    assert {error.where for error in found.errors} == {f"{Q_PROJ}.weight_packed", f"{other}.weight_packed"}
    assert all(error.rule == "relative error" for error in found.errors)


def test_rows_of_one_tensor_shuffled(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")

    def roll(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight_packed"] = tensors[f"{Q_PROJ}.weight_packed"].roll(1, 0)

    change(path, roll)
    _errors(verify(path, against=llama), f"{Q_PROJ}.weight_packed")


def test_a_transposed_square_weight(llama: Path, fresh: Make) -> None:
    path = fresh("w8a8-int8")

    def transpose(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].T

    change(path, transpose)
    _errors(verify(path, against=llama), f"{Q_PROJ}.weight")


def test_a_transposed_weight(llama: Path, fresh: Make) -> None:
    path, name = fresh("w8a8-int8"), "model.layers.0.mlp.up_proj"

    def transpose(tensors: Tensors) -> None:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].T

    change(path, transpose)
    found = verify(path, against=llama)
    assert not found.passed
    assert all(error.where.startswith(name) for error in found.errors)


@pytest.mark.parametrize(
    ("value", "word"), [(0.0, "zero"), (-0.01, "negative"), (float("nan"), "NaN"), (float("inf"), "Inf")]
)
def test_a_scale_that_is_no_scale(value: float, word: str, llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")

    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight_scale"][9, 0] = value

    change(path, spoil)
    for against in (llama, None):
        (error,) = _errors(verify(path, against=against), f"{Q_PROJ}.weight_scale")
        assert word in error.message
        assert "[9, 0]" in error.message


@pytest.mark.parametrize(("scheme", "byte"), [("nvfp4", 0x7F), ("nvfp4", 0xFF), ("mxfp4", 0xFF)])
def test_a_nan_byte_among_the_scales(scheme: str, byte: int, fresh: Make) -> None:
    path = fresh(scheme)

    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight_scale"].view(torch.uint8)[3, 2] = byte

    change(path, spoil)
    (error,) = _errors(verify(path), f"{Q_PROJ}.weight_scale")
    assert "NaN" in error.message


def test_a_nan_byte_among_fp8_codes(fresh: Make) -> None:
    path = fresh("fp8")

    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight"].view(torch.uint8)[60, 7] = 0xFF

    change(path, spoil)
    (error,) = _errors(verify(path), f"{Q_PROJ}.weight")
    assert "0xff at row 60, column 7" in error.message


def test_a_scale_a_little_off(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")

    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight_scale"][9, 0] *= 1.25

    change(path, spoil)
    _errors(verify(path, against=llama), f"{Q_PROJ}.weight_packed")


@pytest.mark.parametrize(
    ("scheme", "leaf"),
    [
        *(("w4a8", leaf) for leaf in ("weight_packed", "weight_scale", "weight_shape")),
        ("w4a16-asym", "weight_zero_point"),
        ("nvfp4", "weight_global_scale"),
        ("fp8", "weight_scale"),
        *(("w4a8-int8", leaf) for leaf in ("weight_channel_scale", "weight_zero_point")),
    ],
)
def test_a_missing_partner(scheme: str, leaf: str, llama: Path, fresh: Make) -> None:
    path = fresh(scheme)
    drop(path, f"{Q_PROJ}.{leaf}")
    for against in (llama, None):
        found = verify(path, against=against)
        assert not found.passed
        assert all(error.where.startswith(Q_PROJ) for error in found.errors)


@pytest.mark.parametrize("said", [[128, 120], [64, 128], [128, 256]])
def test_a_wrong_weight_shape(said: list[int], llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")

    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight_shape"] = torch.tensor(said)

    change(path, spoil)
    (error,) = _errors(verify(path, against=llama), f"{Q_PROJ}.weight_shape")
    assert str(said) in error.message


@pytest.mark.parametrize("where", ["all", "one group"])
def test_zero_points_off_by_one(where: str, llama: Path, fresh: Make) -> None:
    path = fresh("w4a16-asym")

    def spoil(tensors: Tensors) -> None:
        zeros = tensors[f"{Q_PROJ}.weight_zero_point"]
        if where == "all":
            nibbles = [(zeros >> (4 * place)) & 15 for place in range(8)]
            moved = [torch.where(n < 15, n + 1, n - 1) for n in nibbles]
            total = sum(n.long() << (4 * place) for place, n in enumerate(moved))
            tensors[f"{Q_PROJ}.weight_zero_point"] = total.to(torch.uint32).view(torch.int32)  # type: ignore[union-attr]
        else:
            zeros[0, 0] ^= 1

    change(path, spoil)
    (error,) = _errors(verify(path, against=llama), f"{Q_PROJ}.weight_packed")
    assert ("one direction" in error.message) == (where == "all")


@pytest.mark.parametrize("group", [64, 32, 256])
def test_a_wrong_group_size_in_the_config(group: int, llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")
    change_config(path, lambda config: _weights(config).update(group_size=group))
    found = verify(path, against=llama)
    assert not found.passed
    assert any(error.where == Q_PROJ and str(group) in error.message for error in found.errors)


@pytest.mark.parametrize(
    "edit",
    [{"num_bits": 8}, {"symmetric": False}, {"strategy": "channel", "group_size": None}, {"type": "float"}],
)
def test_a_config_that_says_something_else(edit: dict[str, Any], fresh: Make) -> None:
    path = fresh("w4a8")
    change_config(path, lambda config: _weights(config).update(edit))
    found = verify(path)
    assert not found.passed
    # Its 256 columns are two groups; where 128 columns are one, that is one channel under another name.
    assert any(error.where.startswith("model.layers.0.mlp.down_proj") for error in found.errors)


def test_a_config_that_ignores_what_is_quantized(fresh: Make) -> None:
    path = fresh("w4a8")
    change_config(path, lambda config: config["quantization_config"]["ignore"].append(Q_PROJ))
    (error,) = _errors(verify(path), Q_PROJ)
    assert "not quantized" in error.message


def test_a_weight_that_should_be_quantized(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")
    original = load_file(llama / "model.safetensors")[f"{Q_PROJ}.weight"]

    def undo(tensors: Tensors) -> None:
        for leaf in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{Q_PROJ}.{leaf}"]
        tensors[f"{Q_PROJ}.weight"] = original

    change(path, undo)
    (error,) = _errors(verify(path, against=llama), Q_PROJ)
    assert "stored as BF16" in error.message


def test_one_byte_of_an_untouched_tensor(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")

    def touch(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"].view(torch.uint8).reshape(-1)[1001] ^= 1

    change(path, touch)
    (error,) = _errors(verify(path, against=llama), "model.embed_tokens.weight")
    assert "byte 1001 " in error.message
    assert verify(path).passed


def test_a_faithful_copy_of_nan_is_said(llama: Path, fresh: Make, tmp_path: Path) -> None:
    path, source = fresh("w4a8"), copied(llama, tmp_path / "source")

    def spoil(tensors: Tensors) -> None:
        tensors["model.norm.weight"][3] = torch.nan

    change(path, spoil)
    change(source, spoil)
    found = verify(path, against=source)
    assert [f.message for f in found.findings if f.where == "model.norm.weight"] == ["holds 1 NaN or Inf"]


def test_an_untouched_tensor_in_another_dtype(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")

    def widen(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()

    change(path, widen)
    (error,) = _errors(verify(path, against=llama), "model.norm.weight")
    assert "F32" in error.message


def test_missing_and_extra_tensors(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")

    def edit(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["model.mtp.weight"] = torch.ones(3)

    change(path, edit)
    found = verify(path, against=llama)
    assert {error.where for error in found.errors} == {"model.norm.weight", "model.mtp.weight"}


def test_extra_tensors_of_the_source_must_survive(llama: Path, tmp_path: Path) -> None:
    """Heads for multi-token prediction, which model classes drop, are tensors like others."""
    source = copied(llama, tmp_path / "source")
    change(
        source, lambda tensors: tensors.update({"mtp.layers.0.eh_proj.weight": torch.ones(4, 4).bfloat16()})
    )
    out = quantized(source, tmp_path / "out")
    assert verify(out, against=source).passed
    drop(out, "mtp.layers.0.eh_proj.weight")
    _errors(verify(out, against=source), "mtp.layers.0.eh_proj.weight")


def test_an_expert_that_was_lost(tmp_path: Path) -> None:
    source = tiny_model("gpt_oss", tmp_path, num_hidden_layers=1)
    out = quantized(source, tmp_path / "out")
    lost = "model.layers.0.mlp.experts.2.up_proj"
    drop(out, lost)
    (error,) = _errors(verify(out, against=source), "model.layers.0.mlp.experts.gate_up_proj")
    assert lost in error.message


def test_a_truncated_shard(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")
    file = shards(path)[0]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 10)
    (error,) = verify(path, against=llama).errors
    assert file.name in error.message
    assert "truncated" in error.message


def test_two_shards_that_swapped_names(llama: Path, tmp_path: Path) -> None:
    path = quantized(llama, tmp_path / "out", shard_bytes=60_000)
    first, second = shards(path)[:2]
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    found = verify(path, against=llama)
    # Every tensor still has its own bytes, so the values pass; that the index is stale is not hidden.
    assert any("wrong shard" in finding.message for finding in found.findings if finding.level == "warning")


def test_data_of_two_shards_swapped(llama: Path, tmp_path: Path) -> None:
    """The data parts of two files change places under their headers: sizes fit, no value does."""
    path, other = tmp_path / "out", "model.layers.0.self_attn.o_proj"
    quantized(llama, path)
    tensors = load_file(path / "model.safetensors")
    for number, module in enumerate((Q_PROJ, other)):
        part = {name: tensors.pop(name) for name in list(tensors) if name.startswith(module)}
        save_file(part, path / f"model-{number + 1:05d}-of-00003.safetensors")
    save_file(tensors, path / "model-00003-of-00003.safetensors")
    (path / "model.safetensors").unlink()
    assert verify(path, against=llama).passed
    first, second = (file.read_bytes() for file in shards(path)[:2])
    starts = [8 + int.from_bytes(raw[:8], "little") for raw in (first, second)]
    shards(path)[0].write_bytes(first[: starts[0]] + second[starts[1] :])
    found = verify(path, against=llama)
    _errors(found, f"{Q_PROJ}.weight_packed")


def test_nan_in_an_untouched_tensor_without_a_source(fresh: Make) -> None:
    path = fresh("w4a8")

    def spoil(tensors: Tensors) -> None:
        tensors["model.norm.weight"][3] = float("nan")

    change(path, spoil)
    (warning,) = [finding for finding in verify(path).findings if finding.level == "warning"]
    assert warning.where == "model.norm.weight"


def test_kv_scales_are_no_strangers_but_must_be_scales(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")
    name = "model.layers.0.self_attn.k_scale"
    change(path, lambda tensors: tensors.update({name: torch.tensor([0.05])}))
    assert verify(path, against=llama).passed
    change(path, lambda tensors: tensors.update({name: torch.tensor([float("nan")])}))
    _errors(verify(path, against=llama), name)


def test_permuted_groups_are_said_not_to_be_checked(fresh: Make) -> None:
    path = fresh("w4a8")
    change(
        path, lambda tensors: tensors.update({f"{Q_PROJ}.weight_g_idx": torch.arange(128, dtype=torch.int32)})
    )
    found = verify(path)
    (warning,) = [finding for finding in found.findings if finding.level == "warning"]
    assert warning.where == Q_PROJ
    assert "permuted" in warning.message


def test_sources_whose_squares_leave_float32(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path, torch.float32, num_hidden_layers=1)

    def enlarge(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight"] *= 1e25

    change(source, enlarge)
    found = verify(quantized(source, tmp_path / "out"), against=source)
    assert found.passed, found.errors
    (weight,) = [weight for weight in found.weights if weight.name == Q_PROJ]
    assert weight.relative_error is not None
    assert 0.05 < weight.relative_error < 0.2


def test_the_bound_on_the_error(llama: Path, made: Make) -> None:
    assert verify(made("w4a8"), against=llama, max_error=0.2).passed
    found = verify(made("w4a8"), against=llama, max_error=0.01)
    assert len([error for error in found.errors if error.rule == "relative error"]) == 7


def test_another_model_as_source(made: Make, tmp_path: Path) -> None:
    other = tiny_model("llama", tmp_path, seed=1, num_hidden_layers=1)
    found = verify(made("w4a8"), against=other)
    assert {f"{Q_PROJ}.weight_packed", "model.embed_tokens.weight"} <= {error.where for error in found.errors}


def test_codes_that_are_not_nearest_everywhere_are_an_algorithms_choice(llama: Path, fresh: Make) -> None:
    """What GPTQ does: most codes nearest, many one step away, in every group. That is no damage."""
    path = fresh("w4a8")

    def nudge(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        packed = tensors[f"{Q_PROJ}.weight_packed"].long() & 0xFFFFFFFF
        total = torch.zeros_like(packed)
        for place in range(8):
            nibble = (packed >> (4 * place)) & 15
            step = torch.randint(0, 10, nibble.shape, generator=generator)
            moved = (nibble + (step == 0).long() - (step == 1).long()).clamp(0, 15)
            total |= moved << (4 * place)
        tensors[f"{Q_PROJ}.weight_packed"] = total.to(torch.uint32).view(torch.int32)

    change(path, nudge)
    assert verify(path, against=llama).passed


# Readers' rules ---------------------------------------------------------------------------------------------------


def _weights(config: dict[str, Any]) -> dict[str, Any]:
    weights: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    return weights


def test_a_field_that_compressed_tensors_does_not_know(fresh: Make) -> None:
    path = fresh("w4a8")
    change_config(path, lambda config: _weights(config).update(clip="mse"))
    found = verify(path)
    assert found.schema is False
    (error,) = found.errors
    assert error.where.endswith("group_0.weights.clip")


def test_vllm_accepts_w4a8_and_says_why_not(llama: Path, made: Make, tmp_path: Path) -> None:
    assert verify(made("w4a8"), require_vllm=True).passed
    assert verify(made("w4a8")).vllm == []
    assert verify(made("w4a16")).vllm is None
    assert not verify(made("w4a16"), require_vllm=True).passed
    narrow = tiny_model(
        "llama", tmp_path, num_hidden_layers=1, hidden_size=192, num_attention_heads=6, num_key_value_heads=6
    )
    out = quantized(narrow, tmp_path / "out")
    found = verify(out, against=narrow)
    assert found.passed
    assert found.vllm is not None
    assert any(finding.where == Q_PROJ and "group size 64" in finding.message for finding in found.vllm)
    assert not verify(out, require_vllm=True).passed


# Bad input --------------------------------------------------------------------------------------------------------


def test_bad_input(llama: Path, made: Make, tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match="no such directory"):
        verify(tmp_path / "nothing")
    with pytest.raises(HalfbyteError, match=r"no config\.json"):
        verify(tmp_path)
    with pytest.raises(HalfbyteError, match="is quantized itself"):
        verify(made("w4a8"), against=made("fp8"))
    with pytest.raises(HalfbyteError, match="no such directory"):
        verify(made("w4a8"), against=tmp_path / "nothing")


def test_json_has_no_nan(llama: Path, fresh: Make) -> None:
    path = fresh("w4a8")

    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.weight_scale"][:] = float("nan")

    change(path, spoil)
    text = json.dumps(verify(path, against=llama).as_dict(), allow_nan=False)
    assert json.loads(text)["passed"] is False
