"""One calibrated run as a process of its own, so that its peak of memory is nobody else's.

``python -m halfbyte.bench.calibration_process REQUEST.json RESULT.json``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from halfbyte.bench.calibration import CalibrationRequest
from halfbyte.bench.calibration_times import PHASES, CalibrationTimes
from halfbyte.calibration.samples import CalibrationSet, DataReport, Sample
from halfbyte.devices import device_named
from halfbyte.errors import HalfbyteError
from halfbyte.quantization.calibrated import run_calibrated
from halfbyte.quantization.job import prepare
from halfbyte.quantization.report import REPORT_FILE
from halfbyte.recipe import Recipe


def run(request: CalibrationRequest) -> dict[str, Any]:
    """Quantizes, and says in plain numbers how long that took and what it used.

    read_gb, written_gb: what the process read from and wrote to files, the file cache's part included; none where the
    system does not tell. peak_gpu_gb: the most that torch allocated, none on a CPU. model_s: seconds of all blocks of
    the whole model (see :meth:`CalibrationTimes.of_model`). fallbacks: weights that were only rounded to nearest.
    """
    device = device_named(request.device)
    plan = prepare(request.model, Recipe(**request.recipe))
    data = random_samples(request.vocab, request.samples, request.length)
    before = _file_bytes()
    times = CalibrationTimes()
    run_calibrated(plan, request.out, data, device=device, activations=request.activations, on_progress=times)
    times.finish()
    after = _file_bytes()
    document = json.loads((Path(request.out) / REPORT_FILE).read_text())
    model_seconds = times.of_model(request.blocks) if request.blocks else None
    on_gpu = device.type == "cuda"
    return {
        "device": device.type,
        "seconds": round(times.total, 3),
        "start_s": round(times.start or 0.0, 3),
        **{f"{phase}_s": round(times.phase(phase), 3) for phase in PHASES},
        "end_s": round(times.end, 3),
        "block_s": _rounded(times.whole_block),
        "model_s": _rounded(model_seconds),
        "tokens_per_s": None
        if model_seconds is None
        else round(request.samples * request.length / model_seconds, 1),
        "peak_gpu_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 6) if on_gpu else None,
        "read_gb": None if before is None or after is None else round((after[0] - before[0]) / 1e9, 6),
        "written_gb": None if before is None or after is None else round((after[1] - before[1]) / 1e9, 6),
        "fallbacks": len(document["totals"]["fallbacks"]),
        "blocks": [{f"{phase}_s": round(block[phase], 3) for phase in PHASES} for block in times.blocks],
    }


def random_samples(vocab: int, samples: int, length: int, *, seed: int = 0) -> CalibrationSet:
    """``samples`` sequences of ``length`` random tokens below ``vocab``, all of which count."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocab, (samples, length), generator=generator)
    counts = torch.ones(length, dtype=torch.bool)
    return CalibrationSet(
        [Sample(ids, counts) for ids in drawn],
        DataReport(("random tokens",), samples, samples, samples * length, {}, length, length),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _file_bytes() -> tuple[int, int] | None:
    """Bytes that this process has read and written so far, threads included."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    counted = dict(line.split(": ") for line in lines)
    return int(counted["rchar"]), int(counted["wchar"])


def main(request_file: str, result_file: str) -> None:
    request = CalibrationRequest(**json.loads(Path(request_file).read_text()))
    try:
        result = run(request)
    except (HalfbyteError, torch.OutOfMemoryError) as error:
        sys.exit(" ".join(str(error).split()))
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
