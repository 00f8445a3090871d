"""What calibration leaves of the inputs that a layer has seen: no token, only their moments."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from halfbyte.devices import tf32_products

_EXACT_IN_TF32 = (torch.bfloat16, torch.float16)


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
    """Adds up the inputs of many samples. Sums are fp64, so that neither order nor ranks show in the result."""

    def __init__(self, in_features: int, device: torch.device) -> None:
        self.tokens = 0
        self._moment = torch.zeros(in_features, in_features, dtype=torch.float64, device=device)
        self._magnitude = torch.zeros(in_features, dtype=torch.float64, device=device)
        self._absmax = torch.zeros(in_features, device=device)

    def add(self, inputs: torch.Tensor) -> None:
        """Inputs ``[tokens, in]`` of one sample, any float dtype; their products are exact, the sums fp32."""
        values = inputs.float()
        self.tokens += len(values)
        if not len(values):
            return
        magnitudes = values.abs()
        with tf32_products() if inputs.dtype in _EXACT_IN_TF32 else nullcontext():
            self._moment += values.T @ values
        self._magnitude += magnitudes.sum(0, dtype=torch.float64)
        self._absmax = torch.maximum(self._absmax, magnitudes.amax(0))

    def reduce(self) -> None:
        """Adds up over all ranks of ``torch.distributed``, where that is running with more than one."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return
        count = torch.tensor(self.tokens, device=self._moment.device)
        for total in (count, self._moment, self._magnitude):
            torch.distributed.all_reduce(total)
        torch.distributed.all_reduce(self._absmax, op=torch.distributed.ReduceOp.MAX)
        self.tokens = int(count)

    def statistics(self) -> InputStatistics:
        """Means over all tokens so far; zeros if there was none."""
        share = 1.0 / max(self.tokens, 1)
        return InputStatistics(
            self.tokens,
            (self._moment * share).float(),
            (self._magnitude * share).float(),
            self._absmax.clone(),
        )
