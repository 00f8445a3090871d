"""Inputs that were quantized before they reach a layer, so that several layers, or the norm before them, share it."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from halfbyte.formats.spec import ActivationFormat
from halfbyte.kernels.problem import Kernel, Prepared
from halfbyte.schemes import Scheme

FP8_TOKEN, INT8_TOKEN = ActivationFormat("e4m3", "token"), ActivationFormat("int8", "token")
_SUM_GROUPS = (32, 64, 128)


class QuantizedInputs(NamedTuple):
    """``[M, K]`` inputs in E4M3 or INT8, one dynamic scale per token.

    codes: float8_e4m3fn or int8 ``[M, K]``. scales: fp32 ``[M, 1]``. sums: of each token's codes (their values,
    unscaled); with E4M3 over each group along K, fp32 ``[M, ceil(K / group)]``, rows multiples of 16 bytes apart; with
    INT8 over all of K, int32 ``[M, 1]``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor


@runtime_checkable
class SharedInputsKernel(Protocol):
    """A kernel whose inputs can come quantized."""

    def quantize(self, x: torch.Tensor, prepared: Prepared) -> QuantizedInputs:
        """``[M, in]`` as this weight's kernel takes it."""
        ...

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[M, out]`` in the problem's dtype."""
        ...


def sum_group(scheme: Scheme) -> int | None:
    """The group over which :class:`QuantizedInputs` has to sum for a weight of ``scheme``.

    32, 64 or 128 inputs in E4M3; none, that is all of K, in INT8.
    """
    if scheme.activations == INT8_TOKEN:
        return None
    return e4m3_sum_group(scheme)


def e4m3_sum_group(scheme: Scheme) -> int:
    """32, 64 or 128: what a weight's groups are, or are made of."""
    size = scheme.weights.group_size
    return size if size in _SUM_GROUPS else max(_SUM_GROUPS)


def sums_pitch(groups: int) -> int:
    """From one token's sums of ``groups`` groups to the next one's, in fp32 numbers: each begins where 16 bytes do."""
    return -(-groups // 4) * 4


def can_share_inputs(kernel: Kernel, scheme: Scheme) -> bool:
    """Whether ``kernel`` takes :class:`QuantizedInputs` for a layer of ``scheme``."""
    return scheme.activations in (FP8_TOKEN, INT8_TOKEN) and isinstance(kernel, SharedInputsKernel)
