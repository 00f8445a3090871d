"""How much a rounding error in one input is made good for by those that are rounded after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from halfbyte.errors import HalfbyteError

_LARGEST_DAMPING = 1.0
_SMALLEST_RAISED_DAMPING = 0.01


@dataclass(frozen=True)
class Feedback:
    """The order in which inputs are rounded, and what each one takes over from the errors before it.

    order: int64 ``[..., in]``, the largest second moment first, equal ones in their own order.
    factors: float64 ``[..., in, in]``, in that order on both axes: above the diagonal, ``factors[j, k]`` is the part of
        input j's error (weight minus rounded weight) that is added to input k. Zeros for members that fell back.
    damping: what was added to the diagonal, as a share of its mean, per member of the leading axes (row-major);
        none for members that fell back. fallback: their reasons, none for others.
    """

    order: torch.Tensor
    factors: torch.Tensor
    damping: tuple[float | None, ...]
    fallback: tuple[str | None, ...]

    @classmethod
    def of(cls, moment: torch.Tensor, damping: float) -> Feedback:
        """From the inputs' second moments, fp32 ``[..., in, in]``, symmetric.

        With the damped moment H = A A^T, A upper triangular, the factors are ``A[j, k] / A[k, k]``. That is GPTQ
        without an inverse (Chee et al., "QuIP", 2023, section 3 and theorem 6), in float64.
        damping: tried first; raised tenfold up to 1 for members of which Cholesky's factors cannot be had.
        Errors: damping that is negative or not finite.
        """
        if not (math.isfinite(damping) and damping >= 0):
            raise HalfbyteError(
                f"damping {damping} cannot be used; accepted: a number from 0 on, such as 0.01"
            )
        *lead, _, size = moment.shape
        members = moment.reshape(-1, size, size)
        finite = members.isfinite().flatten(1).all(1)
        diagonal = members.diagonal(dim1=-2, dim2=-1).double()
        diagonal = torch.where(finite.unsqueeze(-1), diagonal, 0.0)
        mean = diagonal.mean(-1)
        order = diagonal.argsort(dim=-1, descending=True, stable=True)
        usable = finite & (mean > 0)
        lower, found = _damped_cholesky(_reversed(members, order, mean, usable), mean, _ladder(damping))
        factors = lower.flip(-2, -1)
        del lower
        factors.div_(factors.diagonal(dim1=-2, dim2=-1).clone().unsqueeze(-2))
        reasons = [_reason(*flags) for flags in zip(finite.tolist(), usable.tolist(), found, strict=True)]
        fallen = [reason is not None for reason in reasons]
        if any(fallen):
            factors[torch.tensor(fallen, device=factors.device)] = 0.0
        dampings = (None if reason else value for reason, value in zip(reasons, found, strict=True))
        return cls(order.reshape(*lead, size), factors.reshape(moment.shape), tuple(dampings), tuple(reasons))


def _reversed(
    members: torch.Tensor, order: torch.Tensor, mean: torch.Tensor, usable: torch.Tensor
) -> torch.Tensor:
    """Moments with the inputs last to be rounded first, float64; identities where they are of no use.

    Inputs that were always zero have nothing to do with the others, and an error in them costs nothing: only so that
    there are factors, they get the mean on the diagonal.
    """
    backwards = order.flip(-1)
    picked = torch.arange(len(members), device=members.device)[:, None, None]
    matrix = members[picked, backwards.unsqueeze(-1), backwards.unsqueeze(-2)].double()
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    dead = diagonal == 0
    matrix.masked_fill_(dead.unsqueeze(-1) | dead.unsqueeze(-2), 0.0)
    diagonal.add_(dead * mean.unsqueeze(-1))
    matrix[~usable] = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix


def _ladder(damping: float) -> list[float]:
    steps = [damping]
    while steps[-1] < _LARGEST_DAMPING:
        steps.append(min(max(steps[-1] * 10, _SMALLEST_RAISED_DAMPING), _LARGEST_DAMPING))
    return steps


def _damped_cholesky(
    matrix: torch.Tensor, mean: torch.Tensor, ladder: list[float]
) -> tuple[torch.Tensor, list[float | None]]:
    """Lower factors of float64 ``[b, n, n]``, and the first damping of the ladder that gave each of them, or none.

    Those of which no damping gave any are identities.
    """
    step, *higher = ladder
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(step * mean.unsqueeze(-1))
    lower, info = torch.linalg.cholesky_ex(damped)
    del damped
    failed = info.nonzero().flatten()
    found: list[float | None] = [step] * len(matrix)
    if not len(failed):
        return lower, found
    if higher:
        lower[failed], again = _damped_cholesky(matrix[failed], mean[failed], higher)
    else:
        lower[failed] = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        again = [None] * len(failed)
    for member, damping in zip(failed.tolist(), again, strict=True):
        found[member] = damping
    return lower, found


def _reason(finite: bool, usable: bool, damping: float | None) -> str | None:
    if not finite:
        return "the inputs' second moment holds NaN or Inf"
    if not usable:
        return "the inputs' second moment has no positive diagonal: no input was ever other than zero"
    if damping is None:
        return "the inputs' second moment is not positive definite, however much it is damped"
    return None
