"""The FP8-scale kernel against the one whose numbers it reproduces, bit for bit.

``HALFBYTE_PEERS``: the folder with vLLM's extension module, as for ``halfbyte bench kernels --peers``; without it, an
installed vLLM's.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from halfbyte.bench.kernels import vllm
from halfbyte.bench.kernels.contender import Contender, MissingError
from halfbyte.bench.kernels.operands import Operands
from halfbyte.bench.kernels.ours import scheme_of
from halfbyte.bench.kernels.peers import Peers
from halfbyte.kernels.hopper_fp8_scales import HopperW4A8Fp8Scales
from halfbyte.kernels.problem import LinearProblem

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cutlass() -> Contender:
    folder = os.environ.get("HALFBYTE_PEERS")
    peers = Peers(Path(folder) if folder else None)
    try:
        peers.load_vllm()
    except MissingError as error:
        pytest.skip(str(error))
    return next(one for one in vllm.contenders(peers, 128) if one.name == "vllm-cutlass-w4a8")


# K is not divided for more than 256 tokens, nor for more than 16,896 features.
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((20480, 4096), (1, 16, 64, 100, 128, 256)),
        ((35840, 1024), (1, 64, 128, 256)),
        ((4096, 4096), (300, 512, 2048)),
    ],
    ids=str,
)
def test_every_bit_is_that_of_vllms_kernel(
    cutlass: Contender, shape: tuple[int, int], rows: tuple[int, ...]
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    operands = Operands(shape, max(rows), device)
    theirs = cutlass.load(operands)
    kernel = HopperW4A8Fp8Scales()
    problem = LinearProblem(scheme_of("w4a8", 128), *shape, device, torch.bfloat16)
    prepared = kernel.prepare(operands.seven(128), problem)
    for count in rows:
        expected = theirs(count).calls[0]()
        assert isinstance(expected, torch.Tensor)
        found = kernel.run(operands.x[:count], prepared)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), count
