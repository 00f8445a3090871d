"""What a GPU sustains at most, and the least time that a piece of work can take on it."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.formats.spec import ActivationFormat, TensorFormat

_PLAIN_BITS = 16
_TOKEN_SCALE_BYTES = 4


@dataclass(frozen=True)
class Ceilings:
    """bandwidth: bytes a second. eight_bit, sixteen_bit: operations a second, two to a multiply-add."""

    bandwidth: float
    eight_bit: float
    sixteen_bit: float


# Sustained, not from the data sheet; one H200 SXM of 700 W, torch 2.11, random data. bandwidth: copying 2 GiB,
# bytes read plus bytes written. eight_bit and sixteen_bit: the best dense FP8 and BF16 products of cuBLAS on
# this module's shapes, under the power limit.
H200 = Ceilings(bandwidth=4.27e12, eight_bit=1.4e15, sixteen_bit=0.69e15)

_BY_NAME = {"H200": H200}


def ceilings_of(gpu: str) -> Ceilings | None:
    """Ceilings of the GPU that torch calls ``gpu``; none if nobody has measured them."""
    return next((ceilings for name, ceilings in _BY_NAME.items() if name in gpu.split()), None)


@dataclass(frozen=True)
class Work:
    """nbytes: every input read once and every output written once. operations: two to a multiply-add.

    bits: of the operands that the matrix units multiply, 8 or 16.
    """

    nbytes: float
    operations: float
    bits: int = _PLAIN_BITS

    def floor_us(self, ceilings: Ceilings) -> float:
        """Microseconds below which no kernel can be: the longer of moving the bytes and doing the operations."""
        rate = ceilings.eight_bit if self.bits == 8 else ceilings.sixteen_bit
        return max(self.nbytes / ceilings.bandwidth, self.operations / rate) * 1e6


def linear_work(
    out_features: int,
    in_features: int,
    rows: int,
    weights: TensorFormat | None,
    activations: ActivationFormat | None,
    quantized: bool,
) -> Work:
    """``x [rows, in] @ weight.T`` with 16-bit results.

    weights: none for 16-bit floats. quantized: whether x comes as ``activations`` has it (8-bit codes and an
    fp32 scale per row) or in 16 bits.
    """
    weight_bits = weights.bits_per_weight((out_features, in_features)) if weights else _PLAIN_BITS
    weight_bytes = out_features * in_features * weight_bits / 8
    if activations is not None and quantized:
        input_bytes = rows * (in_features * activations.bits / 8 + _TOKEN_SCALE_BYTES)
    else:
        input_bytes = rows * in_features * _PLAIN_BITS / 8
    output_bytes = rows * out_features * _PLAIN_BITS / 8
    return Work(
        nbytes=weight_bytes + input_bytes + output_bytes,
        operations=2 * rows * out_features * in_features,
        bits=activations.bits if activations else _PLAIN_BITS,
    )
