"""INT4 codes of a weight as files keep them: int32 words in the orders of compressed-tensors, AutoAWQ and GPTQ.

Here codes are int8 ``[out, in]`` in -8..7; in all three orders a word holds eight of them, each 8 larger. Zero points
and scales lie beside the words, and are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.packing import pack_int32, unpack_int32
from halfbyte.formats.packing_awq import pack_awq, unpack_awq
from halfbyte.formats.packing_gptq import pack_gptq, unpack_gptq


class WordOrder(NamedTuple):
    """pack: codes to words. unpack: words and the number of inputs to codes, the inverse; that many there must be."""

    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor, int], torch.Tensor]


def _pack_transposed(codes: torch.Tensor, pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return pack((codes.T + 8).view(torch.uint8))


def _unpack_transposed(
    words: torch.Tensor, inputs: int, unpack: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    codes = unpack(words)
    if codes.shape[0] != inputs:
        raise HalfbyteError(f"the words hold codes of {codes.shape[0]} inputs, not of {inputs}")
    return codes.T.contiguous().view(torch.int8) - 8


WORD_ORDERS: Mapping[str, WordOrder] = {
    "compressed-tensors": WordOrder(
        partial(pack_int32, bits=4), lambda words, inputs: unpack_int32(words, 4, inputs)
    ),
    "awq": WordOrder(
        partial(_pack_transposed, pack=pack_awq), partial(_unpack_transposed, unpack=unpack_awq)
    ),
    "gptq": WordOrder(
        partial(_pack_transposed, pack=partial(pack_gptq, bits=4)),
        partial(_unpack_transposed, unpack=partial(unpack_gptq, bits=4)),
    ),
}
"""By the name of the layout. AWQ takes a multiple of 8 outputs, GPTQ of 8 inputs."""
