"""The kernels in use compile for sm_90a without a GPU, keep their numbers in registers and fit shared memory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not (find_spec("triton") and find_spec("cuda")):  # pragma: no cover
    pytest.skip("the GPU packages are not for this system", allow_module_level=True)

from halfbyte.kernels.hopper.compiler import machine_code
from halfbyte.kernels.hopper.w4a8 import w4a8_source
from halfbyte.kernels.hopper.w4a8_config import SHARED_BYTES, W4A8Config, choose_config, configurations
from halfbyte.kernels.hopper.weight_layout import block_bytes
from tests.kernels.hopper.cubin import spills

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))


@pytest.mark.parametrize("config", configurations(), ids=str)
def test_no_configuration_of_the_table_spills(config: W4A8Config, tmp_path: Path) -> None:
    assert spills(machine_code(w4a8_source(config, 128, BF16, False, BF16)), tmp_path) == 0


@pytest.mark.parametrize(
    ("group", "scale", "zero_points", "out"),
    [
        (64, BF16, False, BF16),
        (32, FP16, True, FP16),
        (128, torch.float32, True, BF16),
        (128, FP16, False, FP16),
    ],
)
@pytest.mark.parametrize("tokens", [1, 16, 64, 1000])
def test_other_weights_compile(
    tokens: int, group: int, scale: torch.dtype, zero_points: bool, out: torch.dtype, tmp_path: Path
) -> None:
    config = choose_config(tokens, 4096, 4096, group, block_bytes(group, scale, zero_points))
    assert spills(machine_code(w4a8_source(config, group, scale, zero_points, out)), tmp_path) == 0


def test_every_shape_fits() -> None:
    for tokens in (1, 9, 33, 65, 129, 257, 4096):
        for features in (16, 6144, 8192, 57344):
            for group, scale, zeros in ((128, BF16, False), (32, torch.float32, True)):
                size = block_bytes(group, scale, zeros)
                config = choose_config(tokens, features, 28672, group, size)
                taken = config.shared_bytes(group, size)
                assert taken <= SHARED_BYTES
                assert (taken + 1024) * config.blocks_per_sm <= 228 * 1024


def test_every_tile_is_computed_once() -> None:
    for tokens, features in ((1, 16), (64, 57344), (300, 656), (8192, 28672)):
        config = choose_config(tokens, features, 4096, 128, 4224)
        tiles = -(-features // (config.rows * config.share)) * -(-tokens // config.tokens)
        clusters = config.blocks(tokens, features) // config.cluster
        rounds = -(-tiles // clusters)
        assert clusters * (rounds - 1) < tiles <= clusters * rounds
        assert config.split == 1 or rounds == 1
