"""Samples that go through a block together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfbyte.calibration.samples import Sample


@dataclass(frozen=True)
class Batch:
    """Samples of one length, so that none is padded.

    ids: int64 ``[n, T]``. counts: bool ``[n * T]``, the tokens that enter statistics; none for all. name: for messages.
    """

    ids: torch.Tensor
    counts: torch.Tensor | None
    name: str


def batched(samples: Sequence[Sample], tokens: int) -> list[Batch]:
    """All samples, those of one length in batches of up to ``tokens`` tokens, at least one sample each."""
    by_length: dict[int, list[int]] = {}
    for number, sample in enumerate(samples):
        by_length.setdefault(len(sample.ids), []).append(number)
    batches = []
    for length, numbers in by_length.items():
        for start in range(0, len(numbers), step := max(1, tokens // max(length, 1))):
            some = numbers[start : start + step]
            counts = torch.cat([samples[number].counts for number in some])
            batches.append(
                Batch(
                    torch.stack([samples[number].ids for number in some]),
                    None if bool(counts.all()) else counts,
                    _name(some, len(samples)),
                )
            )
    return batches


def _name(numbers: Sequence[int], of: int) -> str:
    if len(numbers) == 1:
        return f"sample {numbers[0] + 1} of {of}"
    return f"one of samples {', '.join(str(number + 1) for number in numbers)} of {of}"
