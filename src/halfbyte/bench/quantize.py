"""Time and memory of data-free quantization, beside what safetensors alone takes for the same bytes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from halfbyte.bench.process import halfbyte_command, measure
from halfbyte.bench.record import Row
from halfbyte.bench.synthetic import llama_of_bytes, tensor_bytes, write_dense_checkpoint

# Reads every source shard and writes as many bytes as the quantized checkpoint has, in shards of the source's
# size, each waited for until it is on the disk, as the quantizer does.
_SAFETENSORS_ONLY = """
import os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
source, target, left = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
target.mkdir()
for shard in sorted(source.glob("*.safetensors")):
    tensors = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    kept = {}
    for name, tensor in tensors.items():
        if tensor.nbytes <= left:
            kept[name] = tensor
            left -= tensor.nbytes
    if kept:
        save_file(kept, target / shard.name)
        with open(target / shard.name, "rb") as written:
            os.fsync(written.fileno())
"""


def bench_quantize(folder: Path, gigabytes: float, schemes: list[str], repeats: int = 3) -> list[Row]:
    """Quantize a synthetic Llama-shaped checkpoint of about ``gigabytes`` with each scheme.

    The source is made in ``folder`` once and stays there; outputs are removed. Each row is the fastest of
    ``repeats`` whole processes, baseline and quantizer in turns, so the source is in the file cache for both.
    """
    shape = llama_of_bytes(int(gigabytes * 1e9))
    source = folder / f"llama-{shape.layers}-layers"
    if not (source / "config.json").exists():
        unfinished = folder / f".{source.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        write_dense_checkpoint(unfinished, shape)
        unfinished.rename(source)
    largest = max(map(tensor_bytes, shape.tensors().values()))
    rows: list[Row] = []
    for scheme in schemes:
        out, copy = folder / "quantized", folder / "copied"
        costs, baselines, written = [], [], 0
        for _ in range(repeats):
            shutil.rmtree(out, ignore_errors=True)
            costs.append(
                measure(halfbyte_command("quantize", str(source), "-o", str(out), "--scheme", scheme))
            )
            written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
            shutil.rmtree(out)
            shutil.rmtree(copy, ignore_errors=True)
            only_io = [sys.executable, "-c", _SAFETENSORS_ONLY, str(source), str(copy), str(written)]
            baselines.append(measure(only_io))
            shutil.rmtree(copy)
        cost = min(costs, key=lambda c: c.seconds)
        baseline = min(baselines, key=lambda c: c.seconds)
        rows.append(
            {
                "op": "quantize",
                "scheme": scheme,
                "source_gb": round(shape.nbytes / 1e9, 3),
                "written_gb": round(written / 1e9, 3),
                "largest_tensor_gb": round(largest / 1e9, 3),
                "seconds": round(cost.seconds, 2),
                "peak_rss_gb": round(max(c.peak_rss for c in costs) / 1e9, 3),
                "safetensors_seconds": round(baseline.seconds, 2),
                "share_of_safetensors_speed": round(baseline.seconds / cost.seconds, 3),
            }
        )
    return rows
