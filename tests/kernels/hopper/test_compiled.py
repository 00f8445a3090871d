"""The kernels in use compile for sm_90a without a GPU, keep their numbers in registers and fit shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

if not (find_spec("triton") and find_spec("cuda")):  # pragma: no cover
    pytest.skip("the GPU packages are not for this system", allow_module_level=True)

from halfbyte.kernels.hopper import (
    routes,
    w4a8,
    w4a8_codes,
    w4a8_config,
    w4a8_fp8_scales,
    w4a8_fp8_scales_codes,
    w4a8_fp8_scales_config,
    w4a8_int8,
    w4a8_int8_codes,
    w4a8_int8_config,
    w4a16,
    w4a16_config,
    w8a8,
    w8a8_codes,
    w8a8_config,
)
from halfbyte.kernels.hopper.blocks import BlockFormat
from halfbyte.kernels.hopper.compiler import Source, compile_source
from halfbyte.kernels.hopper.config import MULTIPROCESSORS, QUANTUM, SHARED_BYTES, Table, TileConfig, fitted
from tests.kernels.hopper.cubin import faults

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OTHERS = ((64, FP16, False, BF16), (32, FP16, True, FP16), (128, FP32, True, BF16), (128, FP16, False, FP16))
TABLES: dict[str, Table[Any]] = {
    "w4a8": w4a8_config.FP32,
    "w4a8 with sums in fp16": w4a8_config.FP16,
    "w4a16": w4a16_config.EXACT,
    "w4a16 rounded": w4a16_config.ROUNDED,
    "w4a8 with fp8 scales": w4a8_fp8_scales_config.TABLE,
    "w4a8 on int8": w4a8_int8_config.TABLE,
    "fp8": w8a8_config.TABLE,
}
W4A8 = list(dict.fromkeys([*w4a8_config.FP16.configurations(), *w4a8_config.FP32.configurations()]))
W4A16 = list(dict.fromkeys([*w4a16_config.EXACT.configurations(), *w4a16_config.ROUNDED.configurations()]))


@pytest.mark.parametrize("config", W4A8, ids=str)
def test_no_w4a8_configuration_of_the_table_spills(config: w4a8_config.W4A8Config, tmp_path: Path) -> None:
    fmt = w4a8_codes.block_format(128, True, False)
    fitting = fitted(config, fmt)
    assert fitting is not None
    assert faults(w4a8.w4a8_source(fitting, fmt, BF16), tmp_path) == []


@pytest.mark.parametrize("config", W4A16, ids=str)
def test_no_w4a16_configuration_of_the_table_spills(config: w4a16_config.W4A16Config, tmp_path: Path) -> None:
    fmt = w4a16.block_format(128, BF16, False, BF16)
    fitting = fitted(config, fmt)
    assert fitting is not None
    assert faults(w4a16.w4a16_source(fitting, fmt, BF16), tmp_path) == []


@pytest.mark.parametrize("config", w4a8_fp8_scales_config.TABLE.configurations(), ids=str)
def test_no_configuration_with_fp8_scales_spills(
    config: w4a8_fp8_scales_config.W4A8Fp8ScalesConfig, tmp_path: Path
) -> None:
    fitting = fitted(config, w4a8_fp8_scales_codes.FORMAT)
    assert fitting is not None
    assert faults(w4a8_fp8_scales.w4a8_fp8_scales_source(fitting, BF16), tmp_path) == []


INT8 = w4a8_int8_config.TABLE.configurations()


# Channels have fewer registers to keep: where tokens are few, groups show what there is to see.
@pytest.mark.parametrize(
    ("config", "group"), [*((c, 128) for c in INT8), *((c, None) for c in INT8 if c.tokens >= 128)], ids=str
)
def test_no_configuration_on_int8_spills(
    config: w4a8_int8_config.W4A8Int8Config, group: int | None, tmp_path: Path
) -> None:
    fmt = w4a8_int8_codes.block_format(group)
    fitting = fitted(config, fmt)
    assert fitting is not None
    assert faults(w4a8_int8.w4a8_int8_source(fitting, fmt, BF16), tmp_path) == []


def grouped_sources() -> Iterator[tuple[str, Source]]:
    """The experts' kernels of all heights, and what finds their tiles."""
    fmt = w4a8_codes.block_format(128, True, False)
    for table in (w4a8_config.EXPERTS_FP16, w4a8_config.EXPERTS_FP32):
        for config in table.configurations():
            yield "w4a8", w4a8.w4a8_source(of_experts(config, fmt), fmt, BF16)
    fmt = w4a16.block_format(128, BF16, False, BF16)
    for table16 in (w4a16_config.EXPERTS_ROUNDED, w4a16_config.EXPERTS_EXACT):
        for config16 in table16.configurations():
            yield "w4a16", w4a16.w4a16_source(of_experts(config16, fmt), fmt, BF16)
    fmt = w4a8_fp8_scales_codes.FORMAT
    for scales_config in w4a8_fp8_scales_config.EXPERTS.configurations():
        yield "fp8 scales", w4a8_fp8_scales.w4a8_fp8_scales_source(of_experts(scales_config, fmt), BF16)
    for fp8_config in w8a8_config.TABLE.configurations():
        yield "fp8", w8a8.w8a8_source(of_experts(fp8_config, w8a8_codes.FORMAT), BF16)
    for group in (128, None):
        fmt = w4a8_int8_codes.block_format(group)
        for int8_config in w4a8_int8_config.EXPERTS.configurations():
            yield "int8", w4a8_int8.w4a8_int8_source(of_experts(int8_config, fmt), fmt, BF16)


def of_experts(config: Any, fmt: BlockFormat) -> Any:
    fitting = fitted(config, fmt)
    assert fitting is not None
    return replace(fitting, grouped=True)


GROUPED = {f"{name} {i}": source for i, (name, source) in enumerate(dict.fromkeys(grouped_sources()))}


@pytest.mark.parametrize("name", GROUPED)
def test_no_experts_configuration_spills(name: str, tmp_path: Path) -> None:
    assert faults(GROUPED[name], tmp_path) == []


@pytest.mark.parametrize("tokens", [1, 300, 4096])
@pytest.mark.parametrize(("experts", "heights"), [(8, 1), (512, 2)])
def test_what_finds_the_tiles_compiles(experts: int, heights: int, tokens: int) -> None:
    cut = routes.routes_cut(tokens * 8, experts)
    for ids in (torch.int32, torch.int64):
        code, log = compile_source(routes.routes_source(ids, 8, experts, heights, cut))
        assert code
        assert "0 bytes spill stores" in log


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("features", "tokens"), [(4096, 1), (4096, 64), (28672, 100), (28672, 1000)])
def test_small_groups_on_int8_compile(features: int, tokens: int, group: int, tmp_path: Path) -> None:
    fmt = w4a8_int8_codes.block_format(group)
    config = w4a8_int8_config.TABLE.choose(tokens, features, 4096, fmt)
    assert faults(w4a8_int8.w4a8_int8_source(config, fmt, FP16), tmp_path) == []


@pytest.mark.parametrize(("group", "scale", "zero_points", "out"), OTHERS)
@pytest.mark.parametrize("tokens", [1, 16, 64, 1000])
@pytest.mark.parametrize("features", [4096, 57344])
def test_other_weights_compile(
    features: int,
    tokens: int,
    group: int,
    scale: torch.dtype,
    zero_points: bool,
    out: torch.dtype,
    tmp_path: Path,
) -> None:
    fmt = w4a8_codes.block_format(group, scale is FP16, zero_points)
    table = w4a8_config.table_for(out, 4096, fmt, True)
    source = w4a8.w4a8_source(table.choose(tokens, features, 4096, fmt), fmt, out)
    assert faults(source, tmp_path) == []
    fmt = w4a16.block_format(group, scale, zero_points, out)
    source = w4a16.w4a16_source(
        w4a16_config.table_for(fmt, out).choose(tokens, features, 4096, fmt), fmt, out
    )
    assert faults(source, tmp_path) == []


def formats(name: str) -> list[BlockFormat]:
    """All that the table is for."""
    if name == "w4a8 with fp8 scales":
        return [w4a8_fp8_scales_codes.FORMAT]
    if name == "fp8":
        return [w8a8_codes.FORMAT]
    if name == "w4a8 on int8":
        return [w4a8_int8_codes.block_format(group) for group in (32, 64, 128, None)]
    if name.startswith("w4a8"):
        return [w4a8_codes.block_format(*cut) for cut in product((32, 64, 128), (True, False), (True, False))]
    return [
        fmt
        for group, zero_points, out in product((32, 64, 128), (True, False), (BF16, FP16))
        for scale in (BF16, FP16, FP32)
        if w4a16_config.table_for(fmt := w4a16.block_format(group, scale, zero_points, out), out)
        is TABLES[name]
    ]


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_chosen_for_something(name: str) -> None:
    rows = TABLES[name].rows
    tokens, features, inputs = (sorted({row[axis] for row in rows}) for axis in range(3))
    chosen = {
        next(
            number
            for number, row in enumerate(rows)
            if all(size <= most for size, most in zip(shape, row, strict=False)) and fitted(row[3], fmt)
        )
        for fmt in formats(name)
        for shape in product(tokens, features, inputs)
    }
    assert [row for number, row in enumerate(rows) if number not in chosen] == []


@pytest.mark.parametrize("name", TABLES)
def test_every_shape_fits(name: str) -> None:
    for tokens in (1, 9, 33, 65, 129, 257, 4096):
        for features in (16, 6144, 8192, 57344):
            for fmt in (BlockFormat(128, BF16), BlockFormat(128, FP16), BlockFormat(32, FP32, BF16)):
                config: TileConfig = TABLES[name].choose(tokens, features, 28672, fmt)
                taken = config.shared_bytes(fmt)
                assert taken <= SHARED_BYTES
                assert (taken + 1024) * config.blocks_per_sm <= 228 * 1024


FMT = BlockFormat(128, BF16)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    "fmt", [FMT, BlockFormat(64, FP16), BlockFormat(32, FP16), BlockFormat(32, FP32, BF16)], ids=str
)
def test_tiles_are_not_much_larger_than_what_there_is(name: str, fmt: BlockFormat) -> None:
    for tokens in (1, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 512):
        for features in (16, 2112, 4096, 6144, 10240, 16896, 28672, 40960, 57344, 151936):
            config: TileConfig = TABLES[name].choose(tokens, features, 8192, fmt)
            assert config.tokens < 2 * max(tokens, 8), (tokens, features)


@pytest.mark.parametrize("tokens", [1, 64, 65, 129, 256, 300, 512])
@pytest.mark.parametrize("features", [16, 11008, 25600, 28672, 40960, 53248, 57344, 151936])
@pytest.mark.parametrize(
    "name", ["w4a8 with sums in fp16", "w4a16 rounded", "w4a8 with fp8 scales", "w4a8 on int8"]
)
def test_a_rest_is_one_round_of_smaller_tiles(name: str, features: int, tokens: int) -> None:
    fmt = w4a8_codes.block_format(128, True, False) if name == "w4a8 with sums in fp16" else FMT
    config: TileConfig = TABLES[name].choose(tokens, features, 8192, fmt)
    if config.split > 1:
        assert config.rest is None
        return
    rest = config.rest or replace(config, rows=64, blocks_per_sm=1, share=1)
    first = config.first_features(tokens, features, rest)
    token_tiles = -(-tokens // config.tokens)

    def others(from_feature: int) -> int:
        return -(-(features - from_feature) // rest.rows) * -(-tokens // rest.tokens)

    in_a_round = config.places // token_tiles * config.share * config.rows
    if first < features:
        assert first % in_a_round == 0
        assert features - first < in_a_round
        assert others(first) <= MULTIPROCESSORS
    else:
        whole = features // in_a_round * in_a_round
        assert whole in (0, features) or others(whole) > MULTIPROCESSORS


def test_no_rest_where_tokens_alone_fill_the_rounds() -> None:
    config = w4a8_config.W4A8Config(128, 256, fp16_sums=True)
    rest = w4a8_config.W4A8Config(128, 192, fp16_sums=True)
    assert config.first_features(20_000, 28672, rest) == 28672


@pytest.mark.parametrize("name", TABLES)
def test_a_rest_has_smaller_tiles_of_the_same_numbers(name: str) -> None:
    for config in TABLES[name].configurations():
        rest = config.rest
        if rest is None:
            continue
        assert rest.rows * rest.tokens < config.rows * config.tokens
        assert config.staged_tokens
        assert rest.staged_tokens
        assert all(
            getattr(rest, kind, None) == getattr(config, kind, None) for kind in ("fp16_sums", "rounded")
        )


@pytest.mark.parametrize("group", [32, 64, 128])
def test_sums_in_fp16_where_they_will_do(group: int) -> None:
    fmt, most = w4a8_codes.block_format(group, True, False), 224 * group

    def has_fp16_sums(out: torch.dtype, inputs: int, fmt: BlockFormat = fmt, wanted: bool = True) -> bool:
        table = w4a8_config.table_for(out, inputs, fmt, wanted)
        return table.choose(300, 28672, inputs, fmt).fp16_sums

    assert has_fp16_sums(BF16, most)
    assert not has_fp16_sums(BF16, most + group)
    assert not has_fp16_sums(FP16, most)
    assert not has_fp16_sums(BF16, most, wanted=False)
    assert not has_fp16_sums(BF16, most, w4a8_codes.block_format(group, True, True))
    assert not has_fp16_sums(BF16, most, w4a8_codes.block_format(group, False, False))


# Whole rounds of 132 tiles.
@pytest.mark.parametrize(
    ("name", "fmt", "tokens", "features", "first"),
    [
        ("w4a8 with sums in fp16", w4a8_codes.block_format(128, True, False), 128, 57344, 132 * 256),
        ("w4a8 with sums in fp16", w4a8_codes.block_format(128, True, False), 256, 57344, 3 * 132 * 128),
        ("w4a8 with sums in fp16", w4a8_codes.block_format(128, True, False), 512, 28672, 3 * 66 * 128),
        ("w4a16 rounded", FMT, 256, 57344, 3 * 132 * 128),
        ("w4a16 rounded", FMT, 512, 28672, 3 * 66 * 128),
        ("w4a8 with fp8 scales", w4a8_fp8_scales_codes.FORMAT, 1, 57344, 132 * 256),
        ("w4a8 with fp8 scales", w4a8_fp8_scales_codes.FORMAT, 64, 57344, 132 * 256),
        ("w4a8 with fp8 scales", w4a8_fp8_scales_codes.FORMAT, 128, 57344, 132 * 256),
        ("w4a8 with fp8 scales", w4a8_fp8_scales_codes.FORMAT, 256, 57344, 3 * 132 * 128),
        ("w4a8 with fp8 scales", w4a8_fp8_scales_codes.FORMAT, 512, 28672, 3 * 66 * 128),
    ],
)
def test_a_rest_is_cut_where_it_was_measured(
    name: str, fmt: BlockFormat, tokens: int, features: int, first: int
) -> None:
    config: TileConfig = TABLES[name].choose(tokens, features, 8192, fmt)
    assert config.rest
    assert config.first_features(tokens, features, config.rest) == first


@pytest.mark.parametrize("name", TABLES)
def test_every_tile_is_computed_once(name: str) -> None:
    for tokens, features in ((1, 16), (64, 57344), (300, 656), (8192, 28672)):
        config: TileConfig = TABLES[name].choose(tokens, features, 4096, FMT)
        tiles = -(-features // (config.rows * config.share)) * -(-tokens // config.tokens)
        schedule = config.schedule(tokens, features, 32, FMT)
        clusters = schedule.blocks // config.cluster
        whole = tiles - schedule.streamed
        rounds = -(-whole // clusters)
        assert clusters * (rounds - 1) < whole <= clusters * rounds
        assert config.split == 1 or rounds == 1


@pytest.mark.parametrize("blocks_k", [1, 7, 32, 112])
@pytest.mark.parametrize("tokens", [65, 1000])
@pytest.mark.parametrize("features", [16, 4096, 28672, 57344])
def test_streamed_tiles_are_divided_evenly(features: int, tokens: int, blocks_k: int) -> None:
    config = w4a8_config.W4A8Config(128, 128, stages=4, stream=True)
    schedule = config.schedule(tokens, features, blocks_k, FMT)
    tiles = -(-features // 128) * -(-tokens // 128)
    if not schedule.streamed:
        rounds = -(-tiles // MULTIPROCESSORS)
        assert tiles / (rounds * MULTIPROCESSORS) >= 0.8 or tiles * -(-blocks_k // QUANTUM) < MULTIPROCESSORS
        return
    assert schedule.blocks == MULTIPROCESSORS
    assert (tiles - schedule.streamed) % MULTIPROCESSORS == 0
    assert 0 < schedule.streamed < 2 * MULTIPROCESSORS
    assert schedule.quantum == QUANTUM


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("split", [2, 4, 8])
def test_parts_of_k_begin_where_sums_can_be_copied(group: int, split: int) -> None:
    fmt = BlockFormat(group, BF16)
    schedule = w4a8_config.W4A8Config(8, 64, split=split).schedule(1, 4096, 9, fmt)
    groups = schedule.quantum * 128 // group
    assert groups * 4 % 16 == 0  # bytes of fp32 sums
    assert QUANTUM % schedule.quantum == 0
