"""How the portable kernels keep INT4 codes: spans of inputs, nibble by nibble, so that no lane ever moves.

A span of 64 or 128 inputs of one output channel is cut in 2 (bytes) or 4 (16-bit words) equal parts; unit ``j``
holds code ``j`` of every part, the first part in the lowest nibble. A tile of units then yields one tile of
codes per part by masks and shifts alone, and each part meets its own slice of the inputs. Spans come first,
``[spans, out, units]``: what a block of channels reads for one span is one piece of memory.
"""

from __future__ import annotations

import torch


def byte_span(group_size: int) -> int:
    """Inputs to a span of bytes, by inputs to a scale: a whole group of at most 128, or two of 32."""
    return min(max(group_size, 64), 128)


def pack_spans(nibbles: torch.Tensor, span: int, parts: int, filler: int) -> torch.Tensor:
    """Nibbles 0..15 (uint8) ``[out, in]`` as uint8 (2 parts) or int16 (4 parts) ``[spans, out, span / parts]``.

    filler: the nibble of inputs that complete the last span.
    """
    out, inputs = nibbles.shape
    spans = -(-inputs // span)
    if inputs != spans * span:
        nibbles = torch.nn.functional.pad(nibbles, (0, spans * span - inputs), value=filler)
    pairs = nibbles.view(out, spans, parts // 2, 2, span // parts)
    joined = pairs[..., 1, :] << 4
    joined |= pairs[..., 0, :]
    units = joined.permute(1, 0, 3, 2).contiguous()
    return units.squeeze(-1) if parts == 2 else units.view(torch.int16).squeeze(-1)


def unpack_spans(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """The inverse of :func:`pack_spans`: nibbles (uint8) ``[out, inputs]``."""
    spans, out, units = packed.shape
    joined = packed.view(torch.uint8).view(spans, out, units, -1)
    pairs = torch.stack((joined & 15, joined >> 4), -1)
    return pairs.permute(1, 0, 3, 4, 2).reshape(out, -1)[:, :inputs].contiguous()


def encode_offset(codes: torch.Tensor) -> torch.Tensor:
    """Codes -8..7 (int8) as nibbles code + 8 (uint8), same shape."""
    return (codes + 8).view(torch.uint8)


def decode_offset(nibbles: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`encode_offset`."""
    return nibbles.view(torch.int8) - 8


def encode_magnitude(codes: torch.Tensor) -> torch.Tensor:
    """Codes -8..7 (int8) as a sign in bit 3 and, below it, the code or, if negative, -code - 1 (uint8).

    From these bits three operations on four bytes at once make E4M3 numbers, -8 included.
    """
    return ((codes ^ ((codes >> 7) & 7)) & 15).view(torch.uint8)


def decode_magnitude(nibbles: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`encode_magnitude`."""
    signed = nibbles ^ ((nibbles >> 3) * 7)
    return (signed ^ 8).view(torch.int8) - 8
