"""Time and memory of calibrated quantization, on models of real shapes whose weights are random."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from halfbyte.bench.only_choice import only_choice
from halfbyte.bench.pooled_weights import fill_with_random_weights
from halfbyte.bench.process import measure
from halfbyte.bench.qwen3_moe_shape import Qwen3MoeShape
from halfbyte.bench.record import Row
from halfbyte.bench.synthetic import LlamaShape, write_sparse_checkpoint
from halfbyte.devices import device_named
from halfbyte.errors import HalfbyteError
from halfbyte.quantization.job import prepare
from halfbyte.recipe import Recipe

SHAPES: dict[str, LlamaShape | Qwen3MoeShape] = {
    "8b": LlamaShape(layers=32, vocab=128256),
    "30b-a3b": Qwen3MoeShape(layers=48),
    "tiny": LlamaShape(layers=4, hidden=128, intermediate=256, heads=4, kv_heads=2, vocab=264),
}
"""Llama 3.1 8B, Qwen3 30B-A3B, and one for tests, with all their layers."""
ACTIVATIONS = ("memory", "disk")
_SHARD_BYTES = 2 << 30
_HIDDEN_STATE_BYTES = 4


@dataclass(frozen=True)
class CalibrationCase:
    """shape: one of :data:`SHAPES`. layers: how many of its layers to make, all of them unless given. samples, length:
    sequences of random tokens, and tokens of each. calibrated: how many blocks get the recipe's method, the first ones,
    while others are rounded to nearest; all of them unless given. device, activations: see
    :func:`halfbyte.api.quantize` and :class:`~halfbyte.calibration.request.CalibrationData`.

    Errors: a shape, a number or a name that is not known or out of range; a device that is not there.
    """

    recipe: Recipe
    shape: str = "8b"
    layers: int | None = None
    samples: int = 128
    length: int = 2048
    device: str = "auto"
    activations: str = "memory"
    calibrated: int | None = None

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise HalfbyteError(f"shape {self.shape!r} is not known; accepted: {', '.join(SHAPES)}")
        most = SHAPES[self.shape].layers
        if self.layers is not None and not 1 <= self.layers <= most:
            raise HalfbyteError(f"{self.layers} layers of shape {self.shape}; accepted: 1 to {most}")
        if self.activations not in ACTIVATIONS:
            raise HalfbyteError(f"activations in {self.activations!r}; accepted: {' or '.join(ACTIVATIONS)}")
        only_choice(self.recipe)
        if self.calibrated is not None and not 1 <= self.calibrated <= self.model.layers:
            raise HalfbyteError(
                f"{self.calibrated} calibrated blocks of {self.model.layers}; accepted: 1 to {self.model.layers}"
            )
        device_named(self.device)

    @property
    def model(self) -> LlamaShape | Qwen3MoeShape:
        """The model that is made."""
        whole = SHAPES[self.shape]
        return whole if self.layers is None else replace(whole, layers=self.layers)

    @property
    def run_recipe(self) -> Recipe:
        """The recipe with what holds for blocks that are not calibrated."""
        if self.calibrated is None:
            return self.recipe
        chosen = {"scheme": self.recipe.scheme, "algorithm": self.recipe.algorithm, "clip": self.recipe.clip}
        targets = {f"model.layers.{index}.*": chosen for index in range(self.calibrated)}
        return Recipe(scheme=self.recipe.scheme, targets=targets)


@dataclass(frozen=True)
class CalibrationRequest:
    """model, out: directories. recipe: its fields. vocab: ids of the samples are below it. blocks: of the whole model.
    device, activations: see :func:`halfbyte.api.quantize` and :class:`~halfbyte.calibration.request.CalibrationData`.
    """

    model: str
    out: str
    recipe: dict[str, Any]
    vocab: int
    blocks: int
    samples: int
    length: int
    device: str
    activations: str


def bench_calibration(folder: Path, case: CalibrationCase, say: Callable[[str], None]) -> list[Row]:
    """Quantize a checkpoint of random weights, which is made in ``folder`` and stays there, as a process of its own.

    say: called with a line on what will be on the disk, before it is. Making the checkpoint is not timed; it is in the
    file cache when the run begins, if there is room.
    Returns: a row for the run (see :func:`halfbyte.bench.calibration_process.run`), then one for each block.
    ``model_s`` is measured where all layers were made, and otherwise extrapolated, which ``model_s_is`` says.
    Errors: too little room on the disk; a run that fails, with its last line.
    """
    model, whole = case.model, SHAPES[case.shape]
    source = folder / f"{case.shape}-{model.layers}-layers"
    written = _make(source, case, say)
    with tempfile.TemporaryDirectory(prefix="quantized-", dir=folder) as temporary:
        result, peak = _run(Path(temporary), source, case)
    choice = only_choice(case.recipe)
    about: Row = {
        "shape": case.shape,
        "layers": model.layers,
        "scheme": choice.scheme.name,
        "algorithm": str(choice.method),
        "samples": case.samples,
        "length": case.length,
        "activations": case.activations,
        "calibrated_blocks": case.calibrated or model.layers,
    }
    blocks = result.pop("blocks")
    total: Row = {
        "op": "calibration",
        **about,
        "layers_of_model": whole.layers,
        "source_gb": round(model.nbytes / 1e9, 6),
        "checkpoint_gb": round(written / 1e9, 6),
        **result,
        "model_s_is": _origin(model.layers, whole.layers, case.calibrated),
        "peak_rss_gb": round(peak / 1e9, 6),
    }
    return [
        total,
        *(
            {"op": "calibration_block", **about, "block": number, **seconds}
            for number, seconds in enumerate(blocks, 1)
        ),
    ]


def _make(source: Path, case: CalibrationCase, say: Callable[[str], None]) -> int:
    """The checkpoint to quantize, unless it is there already. Returns the bytes of the quantized one."""
    model = case.model
    made = (source / "config.json").exists()
    unfinished = source if made else source.with_name(f".{source.name}")
    if not made:
        shutil.rmtree(unfinished, ignore_errors=True)
        shards = math.ceil(model.nbytes / _SHARD_BYTES)
        write_sparse_checkpoint(unfinished, model.config(), model.tensors(), shards)
    written = sum(entry.nbytes for entry in prepare(unfinished, case.run_recipe).entries)
    kept = case.samples * case.length * model.hidden * _HIDDEN_STATE_BYTES
    needed = (0 if made else model.nbytes) + written + (kept if case.activations == "disk" else 0)
    free = shutil.disk_usage(source.parent).free
    gigabytes = f"{needed / 1e9:.3f} GB of the disk of {source.parent}, {free / 1e9:.3f} GB free"
    if needed > free:
        raise HalfbyteError(f"bench calibration needs {gigabytes}; accepted: fewer layers or another folder")
    say(f"uses {gigabytes}")
    if not made:
        fill_with_random_weights(unfinished)
        unfinished.rename(source)
    return written


def _run(folder: Path, source: Path, case: CalibrationCase) -> tuple[dict[str, Any], int]:
    """What the process says of itself, and its peak of resident memory in bytes."""
    request = CalibrationRequest(
        model=str(source),
        out=str(folder / "quantized"),
        recipe=case.run_recipe.to_dict(),
        vocab=case.model.vocab,
        blocks=SHAPES[case.shape].layers if case.calibrated is None else 0,
        samples=case.samples,
        length=case.length,
        device=case.device,
        activations=case.activations,
    )
    request_file, result_file = folder / "request.json", folder / "result.json"
    request_file.write_text(json.dumps(asdict(request)))
    module = "halfbyte.bench.calibration_process"
    cost = measure([sys.executable, "-m", module, str(request_file), str(result_file)])
    return json.loads(result_file.read_text()), cost.peak_rss


def _origin(layers: int, of_model: int, calibrated: int | None) -> str:
    if calibrated is not None:
        return "not asked for: not all blocks are calibrated"
    if layers == of_model:
        return "measured"
    if layers < 3:
        return f"not known from {layers} of {of_model} blocks: the first and the last differ from others"
    return f"extrapolated from {layers} of {of_model} blocks"
