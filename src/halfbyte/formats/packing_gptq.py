"""GPTQ's order: codes along the input features, zero points along the output features, as a dense stream of bits.

Code i takes bits i * b .. i * b + b - 1 of its column's stream of int32 words, least significant first. With 3 bits,
32 codes fill three words, and codes 10 and 21 lie across two of them. Zero points come in two dialects: checkpoint
format ``gptq`` (v1) stores zero - 1, ``gptq_v2`` stores the zero itself.
"""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError

GPTQ_BITS = (2, 3, 4, 8)
# Stored zero points are smaller than the real ones by this much.
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


def pack_gptq(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes (uint8) ``[..., in, out]`` as int32 words ``[..., in * bits / 32, out]``.

    Errors: another dtype, bits not in 2, 3, 4, 8, an ``in`` that fills no whole words (3 bits: no multiple of 32).
    """
    if codes.dtype != torch.uint8:
        raise HalfbyteError(f"GPTQ packs uint8 codes, not {codes.dtype}")
    per_run, words = _run(bits)
    if codes.shape[-2] % per_run:
        raise HalfbyteError(
            f"GPTQ packs {bits}-bit codes in runs of {per_run}, not {codes.shape[-2]} of them"
        )
    runs = codes.unflatten(-2, (-1, per_run)).int()
    packed = runs.new_zeros(*runs.shape[:-2], words, runs.shape[-1])
    for index in range(per_run):
        word, shift = divmod(index * bits, 32)
        packed[..., word, :] |= runs[..., index, :] << shift
        if shift + bits > 32:
            packed[..., word + 1, :] |= runs[..., index, :] >> (32 - shift)
    return packed.flatten(-3, -2)


def unpack_gptq(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes (uint8) ``[..., in, out]`` of :func:`pack_gptq`'s words.

    Errors: another dtype, bits not in 2, 3, 4, 8, words that are no whole run.
    """
    if packed.dtype != torch.int32:
        raise HalfbyteError(f"GPTQ's packed codes are int32, not {packed.dtype}")
    per_run, words = _run(bits)
    if packed.shape[-2] % words:
        raise HalfbyteError(
            f"GPTQ packs {bits}-bit codes in runs of {words} words, not {packed.shape[-2]} of them"
        )
    runs = packed.unflatten(-2, (-1, words))
    codes = torch.empty(*runs.shape[:-2], per_run, runs.shape[-1], dtype=torch.uint8, device=packed.device)
    for index in range(per_run):
        word, shift = divmod(index * bits, 32)
        value = runs[..., word, :] >> shift
        if shift + bits > 32:
            # An arithmetic shift repeats the sign: keep only the bits that were there.
            value = (value & ((1 << (32 - shift)) - 1)) | (runs[..., word + 1, :] << (32 - shift))
        codes[..., index, :] = (value & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(-3, -2)


def pack_gptq_zeros(zeros: torch.Tensor, bits: int, checkpoint_format: str) -> torch.Tensor:
    """Zero points (uint8) ``[..., groups, out]`` as int32 words ``[..., groups, out * bits / 32]``.

    checkpoint_format: ``gptq`` or ``gptq_v2``.
    Errors: a zero point 0 in ``gptq``, which would have to be stored as -1 and would be read as 2**bits; zero points
        beyond the codes; and those of :func:`pack_gptq`.
    """
    offset = _zero_offset(checkpoint_format)
    if zeros.dtype == torch.uint8 and zeros.numel():
        low, high = int(zeros.amin()), int(zeros.amax())
        if high >= 1 << bits:
            raise HalfbyteError(f"zero point {high} is no {bits}-bit code; accepted: 0 to {(1 << bits) - 1}")
        if low < offset:
            raise HalfbyteError(
                f"zero point {low} cannot be stored in checkpoint format 'gptq', which stores zero - 1; "
                "accepted: 'gptq_v2', or symmetric weights"
            )
    stored = zeros - offset if offset else zeros
    return pack_gptq(stored.transpose(-1, -2), bits).transpose(-1, -2).contiguous()


def unpack_gptq_zeros(packed: torch.Tensor, bits: int, checkpoint_format: str) -> torch.Tensor:
    """Zero points (int16: ``gptq`` can hold 2**bits itself) ``[..., groups, out]`` of the words of a checkpoint.

    Errors: those of :func:`unpack_gptq`, an unknown checkpoint format.
    """
    offset = _zero_offset(checkpoint_format)
    stored = unpack_gptq(packed.transpose(-1, -2).contiguous(), bits).transpose(-1, -2)
    return stored.to(torch.int16).contiguous() + offset


def _run(bits: int) -> tuple[int, int]:
    """Codes and words of the shortest run that fills whole words."""
    if bits not in GPTQ_BITS:
        raise HalfbyteError(f"GPTQ codes of {bits} bits are not known; accepted: 2, 3, 4, 8")
    return (32, 3) if bits == 3 else (32 // bits, 1)


def _zero_offset(checkpoint_format: str) -> int:
    if checkpoint_format not in ZERO_OFFSETS:
        raise HalfbyteError(
            f"GPTQ checkpoint format {checkpoint_format!r} is not known; accepted: {', '.join(ZERO_OFFSETS)}"
        )
    return ZERO_OFFSETS[checkpoint_format]
