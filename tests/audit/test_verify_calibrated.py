"""Checkpoints whose run moved scales between tensors, and rotated ones, as they are and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.audit.verification import Verification
from halfbyte.audit.verify import verify
from halfbyte.quantization.report import REPORT_FILE
from tests.audit.tamper import (
    Q_PROJ,
    calibrated,
    change,
    change_tensor,
    copied,
    from_nibbles,
    nibbles,
    reindex,
    shards,
)
from tests.tiny import tiny_model

LAYER = "model.layers.0"
V_PROJ, O_PROJ = f"{LAYER}.self_attn.v_proj", f"{LAYER}.self_attn.o_proj"
UP_PROJ, DOWN_PROJ = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj"
NORM = f"{LAYER}.input_layernorm.weight"
FAMILIES = ("llama", "qwen2", "gemma2", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "phi3", "gpt_oss")
ALGORITHMS = ("gptq", "awq", "awq+gptq", "smoothquant")
SCHEMES = ("w4a8", "w8a8-int8", "w4a8-int8")
Edit = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a family, of one block but for DeepSeek's, whose experts are in the second."""
    root = tmp_path_factory.mktemp("sources")

    def make(family: str) -> Path:
        path = root / family
        layers = 2 if family == "deepseek_v3" else 1
        return path if path.exists() else tiny_model(family, root, num_hidden_layers=layers)

    return make


@pytest.fixture(scope="module")
def runs(
    sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """A calibrated checkpoint of a family by an algorithm, made once; not to be changed."""
    root = tmp_path_factory.mktemp("calibrated")

    def make(family: str, algorithm: str) -> Path:
        out = root / f"{family}-{algorithm}"
        return out if out.exists() else calibrated(sources(family), out, algorithm)

    return make


@pytest.fixture
def fresh(runs: Callable[[str, str], Path], tmp_path: Path) -> Callable[[str, str], Path]:
    """The same, to be damaged."""
    return lambda family, algorithm: copied(runs(family, algorithm), tmp_path / f"{family}-{algorithm}")


def _faulty(found: Verification) -> set[str]:
    """The tensors that errors name."""
    assert not found.passed
    return {error.where for error in found.errors}


# As they are written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_calibrated_run_writes_passes(
    family: str, algorithm: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme = SCHEMES[(FAMILIES.index(family) + ALGORITHMS.index(algorithm)) % len(SCHEMES)]
    source = sources(family)
    found = verify(calibrated(source, tmp_path / "out", algorithm, scheme), against=source)
    assert [finding for finding in found.findings if finding.level != "ok"] == []
    bound = 0.02 if scheme == "w8a8-int8" else 0.25
    assert all(0 < weight.relative_error < bound for weight in found.weights)  # type: ignore[operator]
    if algorithm == "smoothquant":  # which has no reason to leave anything as it is
        assert found.moved
        assert found.estimated
    assert algorithm != "gptq" or (found.moved, found.estimated) == (0, 0)


@pytest.mark.parametrize("ignored", [r"re:.*\.[qkv]_proj$|.*\.(gate|up)_proj$", r"re:.*\.(o|down)_proj$"])
def test_scales_move_into_weights_that_are_not_quantized(
    ignored: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    out = calibrated(sources("llama"), tmp_path / "out", "smoothquant", ignore=[ignored])
    found = verify(out, against=sources("llama"))
    assert [finding for finding in found.findings if finding.level != "ok"] == []


def test_a_kernel_with_rounded_products_has_other_nearest_codes(
    sources: Callable[[str], Path], tmp_path: Path
) -> None:
    out = calibrated(sources("llama"), tmp_path / "out", "awq", target="vllm")
    assert verify(out, against=sources("llama")).passed


def test_the_summary_says_that_scales_were_estimated(
    runs: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    found = verify(runs("llama", "smoothquant"), against=sources("llama"))
    (line,) = [finding for finding in found.findings if finding.rule == "moved scales"]
    # Both norms; v_proj and o_proj, up_proj and down_proj.
    assert (found.moved, found.estimated) == (2, 4)
    assert (line.level, line.where) == ("ok", "2 tensors")
    assert "4 weights are compared after scales that were estimated" in line.message
    assert found.as_dict()["moved_scales"] == {"tensors": 2, "weights_after_estimates": 4}


# Damage -----------------------------------------------------------------------------------------------------------


DAMAGE: dict[str, Edit] = {
    "rows permuted": lambda packed: packed.roll(1, 0),
    "columns permuted": lambda packed: packed.roll(1, 1),
    "neighbours swapped": lambda packed: from_nibbles(nibbles(packed).unflatten(-1, (4, 2)).flip(-1).flatten(-2)),
    "words backwards": lambda packed: from_nibbles(nibbles(packed).flip(-1)),
    "codes one too large": lambda packed: from_nibbles((nibbles(packed) + 1).clamp(max=15)),
    "codes one too small": lambda packed: from_nibbles((nibbles(packed) - 1).clamp(min=0)),
    "other offset": lambda packed: packed ^ 0x88888888 - (1 << 32),
    "all zero": torch.zeros_like,
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ["smoothquant", "awq+gptq"])
@pytest.mark.parametrize("module", [Q_PROJ, V_PROJ, O_PROJ, UP_PROJ, DOWN_PROJ])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_codes(
    damage: str,
    module: str,
    algorithm: str,
    fresh: Callable[[str, str], Path],
    sources: Callable[[str], Path],
) -> None:
    path = fresh("llama", algorithm)
    change_tensor(path, f"{module}.weight_packed", DAMAGE[damage])
    assert f"{module}.weight_packed" in _faulty(verify(path, against=sources("llama")))


@pytest.mark.parametrize("module", [Q_PROJ, V_PROJ, O_PROJ])
def test_a_flipped_word_among_codes_that_are_the_nearest(
    module: str, fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    path = fresh("llama", "smoothquant")

    def flip(packed: torch.Tensor) -> torch.Tensor:
        packed[17, 3] ^= -1
        return packed

    change_tensor(path, f"{module}.weight_packed", flip)
    found = verify(path, against=sources("llama"))
    assert _faulty(found) == {f"{module}.weight_packed"}
    assert "row 17, column 2" in found.errors[0].message


@pytest.mark.parametrize("algorithm", ["smoothquant", "awq+gptq"])
def test_an_expert_swapped_with_another(
    algorithm: str, fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    path = fresh("mixtral", algorithm)

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts.0." in name]:
            other = name.replace(".experts.0.", ".experts.1.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    holding = [
        index
        for index, file in enumerate(shards(path))
        if any(".experts.0." in key for key in load_file(file))
    ]
    change(path, swap, *holding)
    faulty = _faulty(verify(path, against=sources("mixtral")))
    assert {name.split(".experts.")[1][0] for name in faulty} == {"0", "1"}


def test_a_shard_of_another_model(
    fresh: Callable[[str, str], Path], sources: Callable[[str], Path], tmp_path: Path
) -> None:
    path = fresh("llama", "smoothquant")
    other = calibrated(
        tiny_model("llama", tmp_path / "other", seed=1, num_hidden_layers=1), tmp_path / "o", "smoothquant"
    )
    (number,) = (
        index for index, file in enumerate(shards(path)) if f"{Q_PROJ}.weight_packed" in load_file(file)
    )
    shards(path)[number].write_bytes(shards(other)[number].read_bytes())
    faulty = _faulty(verify(path, against=sources("llama")))
    assert {f"{name}.weight_packed" for name in (Q_PROJ, V_PROJ, UP_PROJ)} <= faulty


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_gain_that_no_scale_explains(
    value: float, fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    path = fresh("llama", "smoothquant")

    def spoil(gain: torch.Tensor) -> torch.Tensor:
        gain[5] = value
        return gain

    change_tensor(path, NORM, spoil)
    found = verify(path, against=sources("llama"))
    assert _faulty(found) == {NORM}
    assert found.errors[0].message.startswith("gain 5 is ")
    warned = {finding.where for finding in found.findings if finding.level == "warning"}
    assert f"{Q_PROJ}.weight_packed" in warned  # what read it could not be compared


@pytest.mark.parametrize("algorithm", ["smoothquant", "awq+gptq"])
@pytest.mark.parametrize("factor", [0.25, 2.0, 4.0])
@pytest.mark.parametrize(
    ("name", "reader"),
    [(NORM, f"{Q_PROJ}.weight_packed"), (f"{V_PROJ}.weight_scale", f"{O_PROJ}.weight_packed")],
)
def test_a_gain_or_row_that_the_columns_do_not_agree_with(
    name: str,
    reader: str,
    factor: float,
    algorithm: str,
    fresh: Callable[[str, str], Path],
    sources: Callable[[str], Path],
) -> None:
    path = fresh("llama", algorithm)

    def enlarge(values: torch.Tensor) -> torch.Tensor:
        values[5] *= factor
        return values

    change_tensor(path, name, enlarge)
    errors = {error.where: error.message for error in verify(path, against=sources("llama")).errors}
    assert errors[reader].startswith("column 5 is " if name == NORM else "column ")
    assert float(errors[reader].split()[3]) == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt2", "transformer.h.0.ln_1.bias"),
        ("gpt2", "transformer.h.0.attn.c_attn.bias"),
        ("qwen2", f"{LAYER}.self_attn.q_proj.bias"),
        ("qwen2", f"{LAYER}.self_attn.v_proj.bias"),
        ("mixtral", f"{LAYER}.block_sparse_moe.gate.weight"),
        ("gpt_oss", f"{LAYER}.mlp.router.weight"),
    ],
)
def test_what_is_not_quantized_may_differ_by_the_scales_alone(
    family: str, name: str, fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    path = fresh(family, "smoothquant")

    def nudge(values: torch.Tensor) -> torch.Tensor:
        values.view(-1)[-3] = values.view(-1)[-3] * 1.25 + 0.01
        return values

    change_tensor(path, name, nudge)
    assert _faulty(verify(path, against=sources(family))) == {name}


def test_a_row_that_no_scale_explains(
    fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    path = fresh("llama", "smoothquant")

    def enlarge(scales: torch.Tensor) -> torch.Tensor:
        scales[9] *= 1e6
        return scales

    change_tensor(path, f"{V_PROJ}.weight_scale", enlarge)
    found = verify(path, against=sources("llama"))
    assert _faulty(found) == {f"{V_PROJ}.weight_packed"}
    assert found.errors[0].message.startswith("row 9 is ")
    assert "accepted: 0.0001 to 10000" in found.errors[0].message


def test_a_producer_that_cannot_be_read(
    fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    path = fresh("llama", "smoothquant")

    def spoil(scales: torch.Tensor) -> torch.Tensor:
        scales[9] = torch.nan
        return scales

    change_tensor(path, f"{V_PROJ}.weight_scale", spoil)
    found = verify(path, against=sources("llama"))
    assert _faulty(found) == {f"{V_PROJ}.weight_scale"}
    (warning,) = [finding for finding in found.findings if finding.level == "warning"]
    assert warning.where == f"{O_PROJ}.weight_packed"
    assert V_PROJ in warning.message


# The report -------------------------------------------------------------------------------------------------------


def _edit_report(path: Path, edit: Callable[[Any], None]) -> None:
    report = json.loads((path / REPORT_FILE).read_text())
    edit(report)
    (path / REPORT_FILE).write_text(json.dumps(report))


def test_without_its_report_changed_norms_say_what_is_missing(
    fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    path = fresh("llama", "smoothquant")
    (path / REPORT_FILE).unlink()
    found = verify(path, against=sources("llama"))
    (error,) = [error for error in found.errors if error.where == NORM]
    assert f"{REPORT_FILE}, which is missing" in error.message


def _first_fold(kind: str) -> Callable[[Any], Any]:
    return lambda report: next(
        fold for fold in report["blocks"][0]["folds"] if fold["producer"]["kind"] == kind
    )


REPORTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "no blocks": (lambda report: report.pop("blocks"), "no 'blocks'"),
    "no folds": (lambda report: report["blocks"][0].pop("folds"), "no 'folds'"),
    "blocks of another kind": (lambda report: report.update(blocks=3), "is no report"),
    "another kind": (lambda report: _first_fold("norm")(report)["producer"].update(kind="gate"), "'gate'"),
    "an unknown norm": (
        lambda report: _first_fold("norm")(report)["producer"].update(weight="model.none.weight"),
        "model.none.weight with 128 elements, which is no tensor of the source",
    ),
    "a norm twice": (lambda report: report["blocks"][0]["folds"].append(_first_fold("norm")(report)), "twice"),
    "an unknown consumer": (
        lambda report: _first_fold("norm")(report)["consumers"].append("model.none"),
        "model.none, which is no weight of the source",
    ),
    "an unknown producer": (
        lambda report: _first_fold("rows")(report)["producer"].update(module="model.none"),
        "model.none, which is no weight of the source",
    ),
    "rows that are not there": (
        lambda report: _first_fold("rows")(report)["producer"].update(start=1),
        f"rows of {V_PROJ}",
    ),
    "negative rows": (lambda report: _first_fold("rows")(report)["producer"].update(start=-1), "-1 where"),
    "columns that are not there": (
        lambda report: _first_fold("rows")(report).update(repeats=3),
        f"{O_PROJ} reads 64 x 3 columns; it has 128",
    ),
    "broken runs": (lambda report: _first_fold("norm")(report).update(width=0), "in runs of 0"),
}  # fmt: skip


@pytest.mark.parametrize("damage", REPORTS)
def test_a_report_that_does_not_fit(
    damage: str, fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    path = fresh("llama", "smoothquant")
    edit, words = REPORTS[damage]
    _edit_report(path, edit)
    found = verify(path, against=sources("llama"))
    (error,) = [error for error in found.errors if error.rule == "report"]
    assert error.where == str(path / REPORT_FILE)
    assert words in error.message
    assert NORM in _faulty(found)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"recipe": [], "blocks": []}'])
def test_a_report_that_is_none(
    content: bytes, fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    path = fresh("llama", "gptq")
    (path / REPORT_FILE).write_bytes(content)
    assert _faulty(verify(path, against=sources("llama"))) == {str(path / REPORT_FILE)}


def test_folds_that_feed_each_other_end(
    fresh: Callable[[str, str], Path], sources: Callable[[str], Path]
) -> None:
    """No model has such a circle; a report can."""
    path = fresh("llama", "smoothquant")

    def circle(report: Any) -> None:
        back = dict(_first_fold("rows")(report), consumers=[V_PROJ], channels=128, width=128, repeats=1)
        back["producer"] = dict(back["producer"], module=O_PROJ, heads=1, stride=128, width=128)
        report["blocks"][0]["folds"].append(back)

    _edit_report(path, circle)
    found = verify(path, against=sources("llama"))
    assert all(weight.relative_error is not None for weight in found.weights)


# Rotation ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen2", tmp_path_factory.mktemp("tied"), num_hidden_layers=1)


@pytest.fixture
def rotated(tied: Path, tmp_path: Path) -> Path:
    return calibrated(tied, tmp_path / "rotated", "rotation+gptq")


def test_a_rotated_model_is_said_not_to_be_compared(tied: Path, rotated: Path) -> None:
    found = verify(rotated, against=tied)
    (warning,) = [finding for finding in found.findings if finding.level != "ok"]
    assert (warning.level, warning.rule) == ("warning", "rotation")
    assert all(weight.relative_error is None for weight in found.weights)
    assert {finding.rule for finding in found.findings if finding.level == "ok"} == {
        "structure", "values", "compressed-tensors 0.17",
    }  # fmt: skip


def test_a_rotated_model_is_still_checked(tied: Path, rotated: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name == f"{Q_PROJ}.weight_scale":
                tensors[name][3] = torch.nan
            if name == "model.norm.weight":
                tensors[name] = tensors[name].float()
            if name == f"{LAYER}.self_attn.k_proj.bias":
                del tensors[name]
            if name == "lm_head.weight":
                tensors["model.stranger.weight"] = tensors[name].clone()

    for number in range(len(shards(rotated))):
        change(rotated, spoil, number)
    reindex(rotated)
    assert _faulty(verify(rotated, against=tied)) == {
        f"{Q_PROJ}.weight_scale",
        "model.norm.weight",
        f"{LAYER}.self_attn.k_proj.bias",
        "model.stranger.weight",
    }
