"""How much a rounding error in one input is made good for by those that are rounded after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from halfbyte.algorithms.cholesky import cholesky_
from halfbyte.errors import HalfbyteError

_LARGEST_DAMPING = 1.0
_SMALLEST_RAISED_DAMPING = 0.01
# Elements of moments that are copied at a time.
_TOGETHER = 1 << 24


@dataclass(frozen=True)
class Feedback:
    """The order in which inputs are rounded, and what each one takes over from the errors before it.

    order: int64 ``[..., in]``, the largest second moment first, equal ones in their own order.
    factors: fp32 ``[..., in, in]``, in that order on both axes: above the diagonal, ``factors[j, k]`` is the part of
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
        without an inverse (Chee et al., "QuIP", 2023, section 3 and theorem 6).
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
        reversed_moments = _ReversedMoments(members, order.flip(-1), mean, usable)
        matrix, found = _damped_cholesky(reversed_moments, torch.arange(len(members)), _ladder(damping))
        _reverse_(matrix)
        factors = matrix.div_(matrix.diagonal(dim1=-2, dim2=-1).clone().unsqueeze(-2))
        reasons = [_reason(*flags) for flags in zip(finite.tolist(), usable.tolist(), found, strict=True)]
        fallen = [reason is not None for reason in reasons]
        if any(fallen):
            factors[torch.tensor(fallen, device=factors.device)] = 0.0
        dampings = (None if reason else value for reason, value in zip(reasons, found, strict=True))
        factors = factors.unflatten(0, lead) if lead else factors[0]
        return cls(order.reshape(*lead, size), factors, tuple(dampings), tuple(reasons))


@dataclass(frozen=True)
class _ReversedMoments:
    """Moments ``[b, n, n]`` with the inputs last to be rounded first (``backwards``, int64 ``[b, n]``).

    Identities where they are not usable (bool ``[b]``). Inputs that were always zero have nothing to do with the
    others, and an error in them costs nothing: only so that there are factors, they get the mean on the diagonal.
    """

    members: torch.Tensor
    backwards: torch.Tensor
    mean: torch.Tensor
    usable: torch.Tensor

    def damped(self, chosen: torch.Tensor, share: float) -> torch.Tensor:
        """Those of the members ``chosen`` (int64 ``[c]``), fp32 ``[c, n, n]``, with damping."""
        everyone = len(chosen) == len(self.members)
        members, backwards, mean, usable = (
            part if everyone else part[chosen.to(part.device)]
            for part in (self.members, self.backwards, self.mean, self.usable)
        )
        count, size, _ = members.shape
        matrix = torch.empty(members.shape, dtype=torch.float32, device=members.device)
        dead = members.diagonal(dim1=-2, dim2=-1).gather(1, backwards) == 0
        for start in range(0, size, step := max(1, _TOGETHER // (count * size))):
            rows = slice(start, start + step)
            picked = members.gather(1, backwards[:, rows, None].expand(-1, -1, size))
            picked = picked.gather(2, backwards[:, None].expand(-1, picked.shape[1], -1))
            matrix[:, rows] = picked.masked_fill_(dead[:, rows, None] | dead[:, None], 0.0)
        matrix.masked_fill_(~usable[:, None, None], 0.0)
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        damped = diagonal.double() + (dead + share) * mean.unsqueeze(-1)
        diagonal.copy_(torch.where(usable.unsqueeze(-1), damped, 1.0))
        return matrix


def _ladder(damping: float) -> list[float]:
    steps = [damping]
    while steps[-1] < _LARGEST_DAMPING:
        steps.append(min(max(steps[-1] * 10, _SMALLEST_RAISED_DAMPING), _LARGEST_DAMPING))
    return steps


def _damped_cholesky(
    moments: _ReversedMoments, chosen: torch.Tensor, ladder: list[float]
) -> tuple[torch.Tensor, list[float | None]]:
    """Of the chosen members, fp32 ``[c, n, n]``: lower factors; and the first damping that gave them.

    Those of which no damping gave any are identities, with none for their damping.
    """
    step, *higher = ladder
    matrix = moments.damped(chosen, step)
    failed = cholesky_(matrix).nonzero().flatten()
    found: list[float | None] = [step] * len(chosen)
    if not len(failed):
        return matrix, found
    again: list[float | None] = [None] * len(failed)
    if higher:
        matrix[failed], again = _damped_cholesky(moments, chosen[failed.cpu()], higher)
    else:
        matrix[failed] = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for member, damping in zip(failed.tolist(), again, strict=True):
        found[member] = damping
    return matrix, found


def _reverse_(matrix: torch.Tensor) -> None:
    """Reverses both axes of contiguous ``[b, n, n]`` in place."""
    flat = matrix.flatten(1)
    total = flat.shape[1]
    for start in range(0, total // 2, step := max(1, _TOGETHER // len(flat))):
        stop = min(start + step, total // 2)
        front, back = flat[:, start:stop], flat[:, total - stop : total - start]
        kept = front.flip(1)
        front.copy_(back.flip(1))
        back.copy_(kept)


def _reason(finite: bool, usable: bool, damping: float | None) -> str | None:
    if not finite:
        return "the inputs' second moment holds NaN or Inf"
    if not usable:
        return "the inputs' second moment has no positive diagonal: no input was ever other than zero"
    if damping is None:
        return "the inputs' second moment is not positive definite, however much it is damped"
    return None
