"""Codes side by side in larger integers, in the order of compressed-tensors and of two-to-a-byte FP4 files."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.parallel import for_each
from halfbyte.formats.tiles import CPU_CHUNK

PACKED_BITS = tuple(range(2, 9))


def packed_words(size: int, bits: int) -> int:
    """int32 words that ``size`` codes take: 32 // bits to a word, the last one filled up."""
    per_word = 32 // bits
    return -(-size // per_word)


def pack_int32(codes: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Signed codes (int8) along ``dim`` as int32 words, in compressed-tensors' ``pack-quantized`` order.

    Stored is code + 2**(bits-1); code i lies at bit (i mod n) * bits of word i // n, n = 32 // bits; spare bits are
    zero. (3, 5, 6 and 7 bits: what its versions up to 0.17 write; later ones let codes cross words.)
    Errors: another dtype, bits outside 2..8.
    """
    _check(codes, torch.int8, bits)
    rows = codes.movedim(dim, -1)
    size, words = rows.shape[-1], packed_words(rows.shape[-1], bits)
    per_word = 32 // bits
    # Spare places hold the code whose stored value is zero.
    if size != words * per_word:
        spare = rows.new_full((*rows.shape[:-1], words * per_word - size), -(1 << (bits - 1)))
        rows = torch.cat([rows, spare], -1)
    rows = rows.contiguous()
    packed = _pack_fours(rows) if bits == 4 else _pack_any(rows, bits)
    return packed.movedim(-1, dim).contiguous()


def unpack_int32(packed: torch.Tensor, bits: int, size: int, dim: int = -1) -> torch.Tensor:
    """Signed codes (int8), ``size`` of them along ``dim``, from words of :func:`pack_int32`.

    Errors: another dtype, bits outside 2..8, a number of words that ``size`` codes do not take.
    """
    _check(packed, torch.int32, bits)
    rows = packed.movedim(dim, -1)
    if rows.shape[-1] != packed_words(size, bits):
        raise HalfbyteError(
            f"{size} codes of {bits} bits take {packed_words(size, bits)} int32 words, not {rows.shape[-1]}"
        )
    rows = rows.contiguous()
    codes = _unpack_fours(rows) if bits == 4 else _unpack_any(rows, bits)
    return codes[..., :size].movedim(-1, dim).contiguous()


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8) ``[..., C]`` two to a byte ``[..., C / 2]``: the even column in the low nibble.

    Errors: another dtype, an odd number of columns.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise HalfbyteError(f"nibbles need uint8 codes in pairs, not {codes.dtype} {list(codes.shape)}")
    return _join_nibbles(codes.contiguous())


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8) ``[..., 2 * B]`` of bytes (uint8) ``[..., B]``. Errors: another dtype."""
    if packed.dtype != torch.uint8:
        raise HalfbyteError(f"packed nibbles are uint8, not {packed.dtype}")
    return _split_nibbles(packed.contiguous())


def pack_signed_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes -8..7 (int8) ``[..., C]`` two to a byte (int8) ``[..., C / 2]``: the even column in the low nibble.

    Each is in two's complement, as SGLang's w4afp8 reads them. Errors: another dtype, an odd number of columns.
    """
    if codes.dtype != torch.int8 or codes.shape[-1] % 2:
        raise HalfbyteError(f"signed nibbles need int8 codes in pairs, not {codes.dtype} {list(codes.shape)}")
    return _join_nibbles(codes.contiguous()).view(torch.int8)


def unpack_signed_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_signed_nibbles`. Errors: another dtype."""
    if packed.dtype != torch.int8:
        raise HalfbyteError(f"packed signed nibbles are int8, not {packed.dtype}")
    # With their top bits flipped, nibbles are the codes plus 8.
    return _split_nibbles(packed.contiguous().view(torch.uint8) ^ 0x88, offset=8).view(torch.int8)


def _check(tensor: torch.Tensor, dtype: torch.dtype, bits: int) -> None:
    if tensor.dtype != dtype:
        raise HalfbyteError(f"packing {bits} bits needs {dtype}, not {tensor.dtype}")
    if bits not in PACKED_BITS:
        raise HalfbyteError(f"codes of {bits} bits cannot be packed; accepted: 2 to 8")


def _join_nibbles(codes: torch.Tensor, flip: int = 0) -> torch.Tensor:
    """Low nibbles of bytes joined in pairs along the last axis (contiguous, even), then XORed with ``flip``."""
    joined = torch.empty(*codes.shape[:-1], codes.shape[-1] // 2, dtype=torch.uint8, device=codes.device)

    # Two codes at a time as one 16-bit number, which a CPU reads much faster than every other byte.
    def join(part: tuple[torch.Tensor, torch.Tensor]) -> None:
        pairs = part[0] & 0x0F0F
        part[1].copy_(pairs.bitwise_or_(pairs >> 4).bitwise_xor_(flip))

    for_each(join, _chunks(codes.view(-1).view(torch.int16), joined.view(-1)), codes.device)
    return joined


def _split_nibbles(packed: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Nibbles of bytes (contiguous) as bytes, minus ``offset``: the inverse of :func:`_join_nibbles`."""
    split = torch.empty(packed.shape, dtype=torch.int16, device=packed.device)

    def spread(part: tuple[torch.Tensor, torch.Tensor]) -> None:
        pairs, out = part
        out.copy_(pairs)
        out.bitwise_or_(out << 4).bitwise_and_(0x0F0F)
        out.view(torch.int8).sub_(offset)

    for_each(spread, _chunks(packed.view(-1), split.view(-1)), packed.device)
    return split.view(torch.uint8)


def _chunks(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of two flat tensors of one length, small enough to stay in the cache for several passes."""
    return zip(source.split(CPU_CHUNK), target.split(CPU_CHUNK), strict=True)


def _pack_fours(rows: torch.Tensor) -> torch.Tensor:
    # Adding 8 to a signed nibble and dropping the carry flips its top bit: no second pass for the offset.
    return _join_nibbles(rows, flip=0x88).view(torch.int32)


def _unpack_fours(rows: torch.Tensor) -> torch.Tensor:
    return _split_nibbles(rows.view(torch.uint8), offset=8).view(torch.int8)


def _pack_any(rows: torch.Tensor, bits: int) -> torch.Tensor:
    per_word = 32 // bits
    stored = rows.unflatten(-1, (-1, per_word)).int() + (1 << (bits - 1))
    shifts = torch.arange(per_word, dtype=torch.int32, device=rows.device) * bits
    return (stored << shifts).sum(-1, dtype=torch.int32)


def _unpack_any(rows: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(32 // bits, dtype=torch.int32, device=rows.device) * bits
    stored = (rows.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (stored - (1 << (bits - 1))).to(torch.int8).flatten(-2)
