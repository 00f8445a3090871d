"""What ``verify`` found, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

Level = Literal["ok", "warning", "error"]

DEFAULT_MAX_ERROR = 0.5
"""Relative error above which a weight cannot be a coarse copy of its source: the wrong tensor or order."""


class Finding(NamedTuple):
    """``rule`` in short, ``where`` it was applied (tensor, module or file), and the value found with what is right."""

    level: Level
    rule: str
    where: str
    message: str


@dataclass
class WeightCheck:
    """One quantized weight. Errors are none without a source to compare with.

    relative_error: norm of the difference over the norm of the source. largest_error: of one weight, absolute.
    """

    name: str
    scheme: str
    layout: str
    shape: tuple[int, ...]
    scale_min: float | None = None
    scale_max: float | None = None
    relative_error: float | None = None
    largest_error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "scheme": self.scheme,
            "layout": self.layout,
            "shape": list(self.shape),
            "scale_min": _number(self.scale_min),
            "scale_max": _number(self.scale_max),
            "relative_error": _number(self.relative_error),
            "largest_error": _number(self.largest_error),
        }


@dataclass
class Verification:
    """The whole check.

    untouched, untouched_bytes: tensors that equal the source byte for byte.
    moved: other tensors that equal it but for scales that a calibrated run moved into them.
    estimated: weights that were compared after such scales, where these had to be estimated from rounded weights.
    schema: whether compressed-tensors 0.17 accepts the config; none if it is not in that format.
    vllm: why vLLM's W4A8 rules refuse it, empty if they accept it; none if nothing in it is W4A8.
    """

    path: Path
    against: Path | None
    findings: list[Finding] = field(default_factory=list)
    weights: list[WeightCheck] = field(default_factory=list)
    untouched: int = 0
    untouched_bytes: int = 0
    moved: int = 0
    estimated: int = 0
    schema: bool | None = None
    vllm: list[Finding] | None = None

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def passed(self) -> bool:
        """No finding is an error."""
        return not self.errors

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "path": str(self.path),
            "against": str(self.against) if self.against else None,
            "passed": self.passed,
            "findings": [finding._asdict() for finding in self.findings],
            "weights": [weight.as_dict() for weight in self.weights],
            "untouched": {"tensors": self.untouched, "bytes": self.untouched_bytes},
            "moved_scales": {"tensors": self.moved, "weights_after_estimates": self.estimated},
            "compressed_tensors_0_17": self.schema,
            "vllm_w4a8": None if self.vllm is None else {
                "accepted": not self.vllm,
                "because": [finding._asdict() for finding in self.vllm],
            },
        }  # fmt: skip


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
