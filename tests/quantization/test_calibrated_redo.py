"""Calibrated runs over what others left: what is kept, what is refused, what is not in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint.output_directory import OutputDirectory
from halfbyte.checkpoint.writer import CheckpointWriter
from halfbyte.errors import HalfbyteError
from halfbyte.quantization import job
from halfbyte.quantization.report import REPORT_FILE
from halfbyte.recipe import Recipe
from tests.quantization.calibrated_runs import BEST, contents, quantize
from tests.quantization.test_calibrated import StoppedError, report_of, stopped
from tests.tiny import tiny_model

GPTQ = Recipe(algorithm="gptq")


@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe(algorithm="rotation+gptq"), r"rotated false, .* rotated true"),
        (Recipe(algorithm="gptq", target="vllm"), r'target "halfbyte", .* target "vllm"'),
    ],
    ids=["rotation", "target"],
)
def test_blocks_of_another_kind_are_not_mixed(
    recipe: Recipe, said: str, unfinished: bool, tmp_path: Path
) -> None:
    # Not tied, so that a rotated model has the same tensors.
    source = tiny_model("llama", tmp_path, tie_word_embeddings=False)
    out = tmp_path / "out"
    if unfinished:
        stopped(source, out, block=2, recipe=GPTQ)
    else:
        quantize(source, out, GPTQ)
    kept = tmp_path / "out.partial" if unfinished else out
    before = contents(kept)
    with pytest.raises(HalfbyteError, match=f"{kept.name}: was made of .*{said}") as caught:
        quantize(source, out, recipe, redo=["layers.1.*"])
    assert "\n" not in str(caught.value)
    assert contents(kept) == before


def test_blocks_of_another_source_are_not_mixed(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    quantize(source, tmp_path / "out", GPTQ)
    tensors = load_file(source / "model.safetensors")
    tuned = {name: tensor * 1.01 for name, tensor in tensors.items()}
    save_file(tuned, source / "model.safetensors", metadata={"format": "pt"})
    os.utime(source / "model.safetensors", ns=(0, 0))
    with pytest.raises(HalfbyteError, match=r'out: was made of source "\w+", .* and this run is of source'):
        quantize(source, tmp_path / "out", GPTQ, redo=["layers.1.*"])


def test_what_does_not_say_what_it_was_made_of_is_not_kept(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    quantize(source, tmp_path / "old", GPTQ)
    report = report_of(tmp_path / "old")
    del report["origin"]
    (tmp_path / "old" / REPORT_FILE).write_text(json.dumps(report))
    with pytest.raises(HalfbyteError, match="old: does not say what it was made of"):
        quantize(source, tmp_path / "old", GPTQ, redo=["layers.1.*"])


SMALL: dict[str, Any] = {"shard_bytes": 1000}


def test_a_block_larger_than_a_shard_is_redone_whole(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    quantize(source, tmp_path / "whole", GPTQ, **SMALL)
    quantize(source, tmp_path / "out", GPTQ, **SMALL)
    result = quantize(source, tmp_path / "out", GPTQ, redo=["layers.1.*"], **SMALL)
    assert any(note.startswith("redoing 1 of ") for note in result.notes)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_block_larger_than_a_shard_is_resumed_from_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: CheckpointWriter, name: str, data: Any) -> None:
        if name.startswith("model.layers.0.self_attn.v_proj"):
            raise StoppedError
        written.append(name)
        plain(self, name, data)

    source = tiny_model("llama", tmp_path)
    written: list[str] = []
    plain = CheckpointWriter.write
    with monkeypatch.context() as stopping:
        stopping.setattr(CheckpointWriter, "write", write)
        with pytest.raises(StoppedError):
            quantize(source, tmp_path / "out", GPTQ, **SMALL)
    assert any(name.startswith("model.layers.0.") for name in written)
    quantize(source, tmp_path / "out", GPTQ, **SMALL)
    quantize(source, tmp_path / "whole", GPTQ, **SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_an_interrupted_redo_keeps_what_it_did_and_is_no_plain_run(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path, num_hidden_layers=3)
    quantize(source, tmp_path / "out", GPTQ)
    redo = {"recipe": BEST, "redo": ["layers.0.*", "layers.1.*"]}
    stopped(source, tmp_path / "out", block=2, **redo)
    with pytest.raises(HalfbyteError, match=r"out\.partial: holds finished work of another"):
        quantize(source, tmp_path / "out", BEST, overwrite=True)
    done: list[str] = []
    quantize(
        source,
        tmp_path / "out",
        on_progress=lambda state: done.append(f"{state.block} {state.doing}"),
        **redo,
    )  # type: ignore[arg-type]
    assert "1 quantizing" not in done
    assert "2 quantizing" in done
    methods = [
        {module["method"] for module in block["modules"]} for block in report_of(tmp_path / "out")["blocks"]
    ]
    assert methods == [{"awq+gptq clip output"}] * 2 + [{"gptq clip output"}]


def test_a_run_without_data_does_not_discard_calibrated_blocks(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    stopped(source, tmp_path / "out", block=2)
    before = contents(tmp_path / "out.partial")
    with pytest.raises(HalfbyteError, match=r"out\.partial: holds finished work of another") as caught:
        job.run(job.prepare(source, Recipe()), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert contents(tmp_path / "out.partial") == before


def test_a_run_that_failed_in_its_first_block_is_in_no_ones_way(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path)
    stopped(source, tmp_path / "out", block=1)
    assert list((tmp_path / "out.partial").glob("*.safetensors"))
    quantize(source, tmp_path / "out", GPTQ)
    quantize(source, tmp_path / "fresh", GPTQ)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_reports_outlive_a_checkpoint_that_cannot_get_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: OutputDirectory) -> None:
        raise OSError(28, "No space left on device", str(self.out))

    source = tiny_model("llama", tmp_path)
    with monkeypatch.context() as refusing:
        refusing.setattr(OutputDirectory, "publish", full)
        with pytest.raises(HalfbyteError, match="cannot be written"):
            quantize(source, tmp_path / "out")
    quantize(source, tmp_path / "out")
    quantize(source, tmp_path / "fresh")
    assert report_of(tmp_path / "out") == report_of(tmp_path / "fresh")
    assert all(block["folds"] for block in report_of(tmp_path / "out")["blocks"])
