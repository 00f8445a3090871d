from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.hopper.blocks import ROWS
from halfbyte.kernels.hopper.config import TileConfig
from halfbyte.kernels.hopper.operands import Features
from halfbyte.kernels.hopper.w4a8_codes import block_format
from halfbyte.kernels.hopper.w4a8_config import W4A8Config
from halfbyte.kernels.hopper.w4a8_fp8_scales_config import W4A8Fp8ScalesConfig
from halfbyte.kernels.hopper.w4a16_config import W4A16Config

FORMAT = block_format(128, True, False)
CONFIGS = (
    W4A8Config(256, 128, stages=4, parts=2, fp16_sums=True, rest=W4A8Config(128, 128, fp16_sums=True)),
    W4A16Config(256, 128, stages=2, rounded=True, rest=W4A16Config(128, 128, stages=4)),
    W4A8Fp8ScalesConfig(256, 128, stages=4, rest=W4A8Fp8ScalesConfig(128, 128)),
)


def features(n: int, tokens: int) -> Features:
    weight = torch.arange(n // ROWS).view(-1, 1, 1)
    return Features(weight, torch.zeros(tokens, n), (torch.arange(n), None))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_two_launches_have_all_features_between_them(config: TileConfig) -> None:
    whole = features(57344, 200)
    (first, rounds), (second, others) = whole.launches(config, FORMAT)
    assert (first, type(second)) == (config, type(config))
    assert (second.tokens, second.rows) == (128, 128)
    assert rounds.out.shape[1] == 396 * 128  # three rounds of 132 tiles
    rounds.out.fill_(1)
    others.out.add_(2)
    assert torch.equal(whole.out, torch.cat([torch.ones(200, 50688), torch.full((200, 6656), 2.0)], 1))
    for part, begin, end in ((rounds, 0, 50688), (others, 50688, 57344)):
        vector, missing = part.vectors
        assert missing is None
        assert vector is not None
        assert torch.equal(vector, torch.arange(begin, end))
        assert torch.equal(part.weight.flatten(), torch.arange(begin // ROWS, end // ROWS))


@pytest.mark.parametrize(("n", "tokens"), [(50688, 200), (8192, 200), (57344, 2000)])
def test_one_launch_where_a_second_wins_nothing(n: int, tokens: int) -> None:
    whole = features(n, tokens)
    for config in CONFIGS:
        ((only, all_of_it),) = whole.launches(config, FORMAT)
        assert only == config
        assert all_of_it is whole
