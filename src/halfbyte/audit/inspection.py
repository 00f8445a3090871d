"""What ``inspect`` found, as plain data: one row per weight, totals, anomalies. No torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from halfbyte.audit.patterns import MergedNames, Pattern, split_numbers

KINDS = ("linear weights", "scales", "embeddings", "lm_head", "norms", "other")


class ScaleRange(NamedTuple):
    """Smallest and largest magnitude among a weight's finite scales."""

    low: float
    high: float


@dataclass(frozen=True)
class WeightKind:
    """What many weights share: everything but the name and the values.

    scheme: WxAy, or the dtype of a plain weight. preset: our name for these numbers, if there is one.
    group: which weights share a scale. shape: logical. nbytes: with scales; code_nbytes: without.
    """

    role: str
    scheme: str
    preset: str | None
    layout: str
    element: str
    group: str
    shape: tuple[int, ...]
    parameters: int
    nbytes: int
    code_nbytes: int

    @property
    def quantized(self) -> bool:
        return self.layout != "plain"

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales and zero points included."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0


class WeightRow(NamedTuple):
    """One stored weight, or with ``weights`` above 1 the weights whose names fit the pattern ``name``."""

    name: str
    kind: WeightKind
    scales: ScaleRange | None = None
    weights: int = 1
    anomalies: int = 0

    def as_dict(self) -> dict[str, Any]:
        kind = self.kind
        return {
            "name": self.name,
            "count": self.weights,
            "role": kind.role,
            "scheme": kind.scheme,
            "preset": kind.preset,
            "layout": kind.layout,
            "element": kind.element,
            "group": kind.group,
            "shape": list(kind.shape),
            "parameters": kind.parameters * self.weights,
            "bytes": kind.nbytes * self.weights,
            "bits_per_weight": round(kind.bits_per_weight, 4),
            "scale_min": self.scales.low if self.scales else None,
            "scale_max": self.scales.high if self.scales else None,
            "anomalies": self.anomalies,
        }


class Anomaly(NamedTuple):
    """Something that should not be: ``where`` is a tensor or module name."""

    where: str
    what: str


@dataclass
class Inspection:
    """A checkpoint described. ``scales_read`` says whether values of scales were looked at.

    target: whose kernel the weights were rounded for, if config.json says so.
    bytes_by_kind: see :data:`KINDS`. dtypes: safetensors dtype -> (tensors, bytes). files: name -> bytes.
    """

    path: Path
    family: str
    known_family: bool
    format: str
    why: str
    kv_cache: str | None
    target: str | None
    tied: bool
    scales_read: bool
    rows: list[WeightRow] = field(default_factory=list)
    anomalies: list[Anomaly] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parameters: int = 0
    quantized_parameters: int = 0
    quantized_bytes: int = 0
    bytes_by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    dtypes: dict[str, tuple[int, int]] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.bytes_by_kind.values())

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0

    @property
    def bits_per_quantized_weight(self) -> float | None:
        if not self.quantized_parameters:
            return None
        return 8 * self.quantized_bytes / self.quantized_parameters

    def grouped(self) -> list[WeightRow]:
        """The rows with those merged that differ in layer and expert numbers only."""
        bad = _counted(anomaly.where for anomaly in self.anomalies)
        merged: dict[tuple[Pattern, int], _Merged] = {}
        for row in self.rows:
            pattern, numbers = split_numbers(row.name)
            key = pattern, id(row.kind)
            if key not in merged:
                merged[key] = _Merged(pattern, row.kind)
            merged[key].add(row, numbers, bad.get(row.name, 0))
        return [entry.row() for entry in merged.values()]

    def single(self) -> list[WeightRow]:
        """One row per weight, with the number of its anomalies."""
        bad = _counted(anomaly.where for anomaly in self.anomalies)
        return [row._replace(anomalies=bad.get(row.name, 0)) for row in self.rows]

    def as_dict(self, every_weight: bool = False) -> dict[str, Any]:
        """The inspection as JSON-ready data; weights one by one, or merged over layers and experts."""
        return {
            "path": str(self.path),
            "family": self.family,
            "known_family": self.known_family,
            "format": self.format,
            "why": self.why,
            "kv_cache": self.kv_cache,
            "target": self.target,
            "tied": self.tied,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "quantized_parameters": self.quantized_parameters,
            "bits_per_quantized_weight": self.bits_per_quantized_weight,
            "bytes_by_kind": self.bytes_by_kind,
            "dtypes": {dtype: {"tensors": n, "bytes": size} for dtype, (n, size) in self.dtypes.items()},
            "files": self.files,
            "scales_read": self.scales_read,
            "weights": [row.as_dict() for row in (self.single() if every_weight else self.grouped())],
            "anomalies": [anomaly._asdict() for anomaly in self.anomalies],
            "notes": self.notes,
        }


class _Merged:
    """Weights of one pattern, while they are counted."""

    def __init__(self, pattern: Pattern, kind: WeightKind) -> None:
        self._kind = kind
        self._names = MergedNames(pattern)
        self._low, self._high = float("inf"), float("-inf")
        self._anomalies = 0

    def add(self, row: WeightRow, numbers: list[int], anomalies: int) -> None:
        self._names.add(numbers)
        self._anomalies += anomalies
        if row.scales:
            self._low, self._high = min(self._low, row.scales.low), max(self._high, row.scales.high)

    def row(self) -> WeightRow:
        scales = ScaleRange(self._low, self._high) if self._low <= self._high else None
        return WeightRow(str(self._names), self._kind, scales, self._names.count, self._anomalies)


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
