"""Inputs of a layer as calibration would see them: a few channels far larger than the others, and correlated."""

from __future__ import annotations

import torch

from halfbyte.calibration.statistics import InputMoments, InputStatistics


def outlier_inputs(tokens: int, features: int, seed: int = 0) -> torch.Tensor:
    """fp32 ``[tokens, features]``, every 17th channel 20 times the size of the others."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, features, generator=generator) + torch.randn(tokens, 1, generator=generator)
    sizes = torch.ones(features)
    sizes[::17] = 20.0
    return mixed * sizes


def statistics_of(inputs: torch.Tensor) -> InputStatistics:
    moments = InputMoments(inputs.shape[1], inputs.device)
    moments.add(inputs[None])
    return moments.finish()[0]
