"""Rotating weights: the same model in other coordinates, in which no channel stands out.

With an orthogonal R, what puts a vector out is multiplied by R^T and what reads it by R: a linear's output R^T W x
goes into W' R. A norm in between must have no gain of its own (:func:`fold_gain`).
Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024, section 4.
"""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError

# Rows that are in the rotation's dtype at a time: embeddings have many.
_ROWS = 4096


def rotate_inputs(weight: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """W R: a weight ``[out, in]`` (or an embedding ``[vocab, hidden]``) in rotated inputs, fp32.

    rotation: orthogonal ``[size, size]``, fp64 or fp32, in which products are computed; where ``size`` is a part of
    ``in``, every run of ``size`` columns is rotated alone (the heads that o_proj reads).
    Errors: a size that does not divide ``in``.
    """
    _check(weight.shape[-1], rotation)
    rotated = torch.empty(weight.shape, device=weight.device)
    for rows, result in zip(weight.split(_ROWS), rotated.split(_ROWS), strict=True):
        heads = rows.to(rotation.dtype).unflatten(-1, (-1, rotation.shape[0]))
        result.copy_((heads @ rotation).flatten(-2))
    return rotated


def rotate_outputs(weight: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """R^T W: a weight ``[out, in]`` with rotated outputs, fp32.

    rotation: as for :func:`rotate_inputs`; where ``size`` is a part of ``out``, every run of ``size`` rows is rotated
    alone (the heads that v_proj puts out: query heads that share one are rotated with it).
    Errors: a size that does not divide ``out``.
    """
    return rotate_inputs(weight.t(), rotation).t().contiguous()


def rotate_bias(bias: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """R^T b: the bias ``[out]`` of a linear with rotated outputs, fp32; ``rotation`` as for :func:`rotate_outputs`."""
    return rotate_inputs(bias[None], rotation)[0]


def fold_gain(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """W diag(gain): a weight ``[out, in]`` that reads a norm whose gain ``[in]`` becomes one, fp32."""
    return weight.float() * gain.float()


def _check(features: int, rotation: torch.Tensor) -> None:
    if rotation.dim() != 2 or rotation.shape[0] != rotation.shape[1] or features % rotation.shape[0]:
        raise HalfbyteError(
            f"a rotation {list(rotation.shape)} does not fit {features} features; accepted: square, of a divisor"
        )
