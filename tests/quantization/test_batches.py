from __future__ import annotations

import torch

from halfbyte.calibration.samples import Sample
from halfbyte.quantization.batches import batched


def made(*lengths: int, masked: int | None = None) -> list[Sample]:
    """Each sample's ids are its number; the first token of sample ``masked`` does not count."""
    return [
        Sample(torch.full((length,), number), torch.arange(length) >= (number == masked))
        for number, length in enumerate(lengths)
    ]


def test_samples_of_one_length_come_together_up_to_a_number_of_tokens() -> None:
    found = batched(made(4, 8, 4, 4, 8, 100), 8)
    assert [batch.ids[:, 0].tolist() for batch in found] == [[0, 2], [3], [1], [4], [5]]
    assert [batch.ids.shape[1] for batch in found] == [4, 4, 8, 8, 100]
    assert all(batch.counts is None for batch in found)
    assert [batch.name for batch in found][:2] == ["one of samples 1, 3 of 6", "sample 4 of 6"]


def test_one_token_leaves_every_sample_alone() -> None:
    assert [batch.ids[:, 0].tolist() for batch in batched(made(4, 4, 4), 1)] == [[0], [1], [2]]


def test_masks_follow_their_samples() -> None:
    first, second = batched(made(3, 3, 3, 3, masked=1), 6)
    assert first.counts is not None
    assert first.counts.tolist() == [True, True, True, False, True, True]
    assert second.counts is None
