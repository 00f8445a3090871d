"""What a run found: numbers, and why some are missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from halfbyte.bench.kernels.contender import MissingError
from halfbyte.bench.record import Row, record
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.roofline import Ceilings, Work

_REASON_LENGTH = 300


@dataclass
class Results:
    """rows: one per kernel, shape and M. missing: what took no part or failed, and why.

    gpu: its name. rivals: versions by distribution.
    """

    gpu: str
    rivals: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)

    def record(self, command: str) -> dict[str, Any]:
        """The usual record with the GPU and the rivals' versions, and ``missing`` beside ``rows``."""
        result = record(self.rows, command)
        result["meta"]["versions"].update(self.rivals)
        return {**_with_gpu(result, self.gpu), "missing": self.missing}

    def miss(self, kernel: str, why: Exception | str, **where: Any) -> None:
        """Notes that ``kernel`` has no number, everywhere or at an op, shape and M."""
        reason = (
            str(why)
            if isinstance(why, (str, MissingError, HalfbyteError))
            else f"{type(why).__name__}: {why}"
        )
        said = {"kernel": kernel, **where, "reason": " ".join(reason.split())[:_REASON_LENGTH]}
        if said not in self.missing:
            self.missing.append(said)


def name_gpu(result: dict[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """A record with the GPU's name in its ``meta``: of ``device`` or the current one, none where there is none."""
    return _with_gpu(result, torch.cuda.get_device_name(device)) if torch.cuda.is_available() else result


def _with_gpu(result: dict[str, Any], name: str) -> dict[str, Any]:
    return {**result, "meta": {**result["meta"], "gpu": name}}


def figures(work: Work, times: list[float], ceilings: Ceilings | None) -> Row:
    """Times and what they mean. times: microseconds of each pass.

    ``us`` is the fastest pass, ``us_median`` their median. ``floor_us`` is none on a GPU whose ceilings nobody
    measured. ``tbps`` counts the least bytes, in TB/s; ``tflops`` the operations.
    """
    best = min(times)
    ordered = sorted(times)
    middle = (ordered[(len(times) - 1) // 2] + ordered[len(times) // 2]) / 2
    return {
        "us": round(best, 3),
        "us_median": round(middle, 3),
        "passes": [round(time, 3) for time in times],
        "floor_us": None if ceilings is None else round(work.floor_us(ceilings), 3),
        "tbps": round(work.nbytes / best * 1e-6, 3),
        "tflops": round(work.operations / best * 1e-6, 1),
    }
