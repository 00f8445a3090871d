"""The FP8-scale kernel against the one whose numbers it reproduces, bit for bit.

Both get scales that ``split_scales`` has split, and codes without -8, which vLLM's conversion of weights may not know.
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
from halfbyte.kernels.hopper.config import fitted
from halfbyte.kernels.hopper.w4a8_fp8_scales_codes import FORMAT
from halfbyte.kernels.hopper.w4a8_fp8_scales_config import TABLE
from halfbyte.kernels.hopper_fp8_scales import HopperW4A8Fp8Scales
from halfbyte.kernels.problem import LinearProblem


@pytest.fixture(scope="module")
def cutlass() -> Contender:
    folder = os.environ.get("HALFBYTE_PEERS")
    peers = Peers(Path(folder) if folder else None)
    try:
        peers.load_vllm()
    except MissingError as error:
        pytest.skip(f"{error}; HALFBYTE_PEERS names a folder with its extension module")
    return next(one for one in vllm.contenders(peers, 128) if one.name == "vllm-cutlass-w4a8")


# K is not divided for more than 256 tokens, nor for more features than fill the GPU. Each row of the table that does
# not divide it has a case here. (Where K is no multiple of 512, vLLM's reordering of weights may leave their memory.)
CASES = [
    ((4096, 4096), (257, 300, 512, 2048)),
    ((6144, 2560), (129, 256, 400, 512)),
    ((8192, 2560), (200, 256, 512)),
    ((12288, 2560), (33, 64, 128, 256)),
    ((20480, 4096), (1, 16, 32, 64, 100, 128, 256)),
    ((28672, 2560), (64, 128, 256, 512)),
    ((57344, 2560), (1, 8, 16, 32, 64, 128, 256, 512)),
]


def test_all_rows_of_the_table_are_compared() -> None:
    compared = [TABLE.choose(count, *shape, FORMAT) for shape, rows in CASES for count in rows]
    whole = [config for config in TABLE.configurations() if config.split == 1]
    rests = [config.rest for config in compared if config.rest]
    assert [
        config
        for config in whole
        if fitted(config, FORMAT) not in (*compared, *(fitted(rest, FORMAT) for rest in rests))
    ] == []
    assert all(config.split == 1 for config in compared)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "rows"), CASES, ids=str)
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
