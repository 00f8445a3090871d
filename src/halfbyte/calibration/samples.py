"""Samples: the token sequences that a model is calibrated on, and which of their tokens count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """One sequence as a model sees it, never padded.

    ids: int64 ``[tokens]``. counts: bool ``[tokens]``, false where a token is seen and enters no statistic.
    """

    ids: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class DataReport:
    """What was read and what became of it; tokens are those of the samples, whatever else the data holds.

    sources: files, or ``built-in``. requested, samples: samples asked for and made. tokens: all of them; masked: those
    that do not count, by reason (``template``, ``role:ROLE``, ``weight``, ``span``). shortest, longest: tokens of a
    sample. truncated: chats that were cut. split: documents of which a sample holds a part. skipped: rows that gave no
    sample, by reason. notes: what a user should know, one sentence each.
    """

    sources: tuple[str, ...]
    requested: int
    samples: int
    tokens: int
    masked: dict[str, int]
    shortest: int
    longest: int
    truncated: int = 0
    split: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def counted(self) -> int:
        """Tokens that enter statistics."""
        return self.tokens - sum(self.masked.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, ``counted`` included."""
        plain = asdict(self)
        return {**plain, "sources": list(self.sources), "notes": list(self.notes), "counted": self.counted}


@dataclass(frozen=True)
class CalibrationSet:
    samples: Sequence[Sample]
    report: DataReport
