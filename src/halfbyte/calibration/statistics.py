"""What calibration leaves of the inputs that a layer has seen: no token, only their moments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Bands of rows that a moment is cut into, and the fewest rows that are worth a product of their own.
_BANDS, _FEWEST_ROWS = 8, 1024
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class InputStatistics:
    """Moments of the inputs ``[tokens, in]`` of one or more layers that read the same tensor.

    tokens: how many tokens count (masked ones do not). moment: mean of ``x x^T``, fp32 ``[in, in]``; twice this is
    GPTQ's Hessian. absmean, absmax: mean and largest magnitude of each input channel, fp32 ``[in]``.
    """

    tokens: int
    moment: torch.Tensor
    absmean: torch.Tensor
    absmax: torch.Tensor


class InputMoments:
    """Adds up the inputs of many samples, of one layer or of a stack of them that see inputs of their own.

    Sums over samples are fp64, so that neither order nor ranks show in the result.
    """

    def __init__(self, in_features: int, device: torch.device, members: int = 1) -> None:
        self._tokens = [0] * members
        step = max(_FEWEST_ROWS, -(-in_features // _BANDS))
        # Moments are symmetric: of each band of rows only what begins at its diagonal.
        self._bands = [
            torch.zeros(
                members,
                min(step, in_features - start),
                in_features - start,
                dtype=torch.float64,
                device=device,
            )
            for start in range(0, in_features, step)
        ]
        self._magnitudes = torch.zeros(members, in_features, dtype=torch.float64, device=device)
        self._absmax = torch.zeros(members, in_features, device=device)

    def add(self, inputs: torch.Tensor, first: int = 0) -> None:
        """Inputs of one sample, any float dtype: ``[n, tokens, in]`` of members ``first`` to ``first + n``.

        Their products are exact, the sums fp32.
        """
        count, tokens, _ = inputs.shape
        members = slice(first, first + count)
        for index in range(first, first + count):
            self._tokens[index] += tokens
        if not tokens:
            return
        start = 0
        for band in self._bands:
            stop = start + band.shape[1]
            band[members] += _products(inputs[..., start:stop], inputs[..., start:])
            start = stop
        magnitudes = inputs.abs()
        self._magnitudes[members] += magnitudes.sum(1, dtype=torch.float64)
        self._absmax[members] = torch.maximum(self._absmax[members], magnitudes.amax(1).float())

    def reduce(self) -> None:
        """Adds up over all ranks of ``torch.distributed``, where that is running with more than one."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return
        counts = torch.tensor(self._tokens, device=self._magnitudes.device)
        for total in (counts, *self._bands, self._magnitudes):
            torch.distributed.all_reduce(total)
        torch.distributed.all_reduce(self._absmax, op=torch.distributed.ReduceOp.MAX)
        self._tokens = counts.tolist()

    def finish(self) -> list[InputStatistics]:
        """Means over all tokens, for each member; zeros if there was none. Nothing can be added afterwards."""
        shares = torch.tensor([1.0 / max(tokens, 1) for tokens in self._tokens], dtype=torch.float64)
        shares = shares.to(self._magnitudes.device)[:, None]
        members, size = self._magnitudes.shape
        moments = self._absmax.new_empty(members, size, size)
        stop = size
        while self._bands:  # one after the other makes room for what it becomes
            band = self._bands.pop()
            start = stop - band.shape[1]
            means = band.mul_(shares[:, :, None]).float()
            moments[:, start:stop, start:] = means
            moments[:, stop:, start:stop] = means[:, :, stop - start :].mT
            stop = start
        magnitudes = (self._magnitudes * shares).float()
        return [
            InputStatistics(tokens, *parts)
            for tokens, *parts in zip(self._tokens, moments, magnitudes, self._absmax, strict=True)
        ]


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sums over tokens of x y^T of inputs ``[n, tokens, ...]``: fp32, products of 16 bits exact."""
    if left.is_cuda and left.dtype in _SIXTEEN_BITS:
        return torch.bmm(left.mT, right, out_dtype=torch.float32)
    return left.float().mT @ right.float()
