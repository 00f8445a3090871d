"""The audit's own decoder of QServe's weights, and what ``verify`` and ``inspect`` say of such checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from halfbyte.audit.declared import declared
from halfbyte.audit.decode_qserve import QServeDecoder
from halfbyte.audit.inspect import inspect
from halfbyte.audit.modules import gather
from halfbyte.audit.verify import verify
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.quantization import job
from halfbyte.recipe import Recipe
from tests.audit.tamper import Q_PROJ, change, change_config, change_tensor, copied, drop
from tests.checkpoint.files import CONFIG, write_checkpoint
from tests.checkpoint.qserve_files import GROUP, packed_groups, per_channel, two_levels

M = "model.layers.0.mlp.up_proj"
SIZES = (128, -1)


@pytest.fixture(scope="session")
def written(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The tiny Llama in QServe's form, made once; not to be changed."""
    root = tmp_path_factory.mktemp("audit-qserve")

    def make(size: int) -> Path:
        if not (root / str(size)).exists():
            recipe = Recipe(scheme="w4a8-int8", group_size=size, format="qserve")
            job.run(job.prepare(llama, recipe), root / str(size))
        return root / str(size)

    return make


def decoded(path: Path, tensors: dict[str, torch.Tensor], size: int) -> tuple[QServeDecoder, np.ndarray]:
    entry = {"quant_method": "qoq", "wbits": 4, "group_size": size}
    config = {**CONFIG, "quantization_config": entry}
    checkpoint = Checkpoint.open(write_checkpoint(path, {"model.safetensors": tensors}, config=config))
    (module,) = gather(checkpoint.tensors, declared(checkpoint.config)).modules
    assert module.stored.faults == ()
    decoder = QServeDecoder(checkpoint, module)
    rows = [
        tiles.scaled(tiles.by_tile(tiles.table.value_of(tiles.codes))).reshape(len(tiles.codes), -1)
        for tiles in decoder.chunks()
    ]
    return decoder, np.concatenate(rows)


def random(*shape: int, low: int = 0, high: int = 15, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def test_two_levels(tmp_path: Path) -> None:
    # Several chunks, offsets that are no multiples of scales, one below INT8.
    codes, scales = random(96, 4096, low=8), random(96, 32, low=1, high=8)
    offsets = -8 * scales + random(96, 32, low=-20, high=20, seed=1)
    scales[40, 3], offsets[40, 3] = 16, -240
    channels = torch.linspace(1e-3, 2e-3, 96).half()
    decoder, found = decoded(tmp_path, two_levels(M, codes, scales, offsets, channels), 128)
    level_one = codes * scales.repeat_interleave(GROUP, 1) + offsets.repeat_interleave(GROUP, 1)
    assert decoder.fault is None
    assert decoder.shape == (96, 4096)
    np.testing.assert_allclose(found, (level_one.double() * channels.double()[:, None]).numpy(), rtol=1e-5)


def test_channels_as_the_kernel_computes_them(tmp_path: Path) -> None:
    codes, zeros, scales = random(64, 96), random(64, seed=1), torch.linspace(1e-3, 2e-3, 64).half()
    stored = per_channel(M, codes, scales, zeros)
    decoder, found = decoded(tmp_path, stored, -1)
    want = codes * scales.double()[:, None] - stored[f"{M}.s1_szeros"].double()[:, None]
    assert decoder.fault is None
    np.testing.assert_allclose(found, want.numpy(), atol=1e-8)


@pytest.mark.parametrize("clip", ["none", "mse"])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_passes(size: int, clip: str, llama: Path, tmp_path: Path) -> None:
    recipe = Recipe(scheme="w4a8-int8", group_size=size, format="qserve", clip=clip)
    job.run(job.prepare(llama, recipe), tmp_path / "out")
    found = verify(tmp_path / "out", against=llama)
    assert [finding for finding in found.findings if finding.level != "ok"] == []
    assert [weight.layout for weight in found.weights] == ["qserve"] * 7
    assert all(0.05 < weight.relative_error < 0.16 for weight in found.weights)  # type: ignore[operator]
    assert all(weight.scale_max and weight.scheme == "W4A8" for weight in found.weights)
    assert found.untouched == 5


@pytest.mark.parametrize("size", SIZES)
def test_inspect_names_the_preset(size: int, written: Callable[[int], Path]) -> None:
    found = inspect(written(size))
    assert (found.format, found.anomalies) == ("qoq (qserve)", [])
    rows = [row for row in found.rows if row.kind.quantized]
    assert {(row.kind.layout, row.kind.scheme, row.kind.group) for row in rows} == {
        ("qserve", "W4A8", "128" if size == 128 else "channel")
    }
    if size == 128:
        assert {row.kind.preset for row in rows} == {"w4a8-int8"}


# Damage: each must be seen, and the tensor named


@pytest.mark.parametrize("size", SIZES)
def test_a_flipped_nibble(size: int, llama: Path, written: Callable[[int], Path], tmp_path: Path) -> None:
    path = copied(written(size), tmp_path / "damaged")

    def flip(codes: torch.Tensor) -> torch.Tensor:
        # The high half of byte 4 of the first tile: row 0 + 8 + 16, column 0.
        codes.view(torch.uint8).view(-1)[4] ^= 0x80
        return codes

    change_tensor(path, f"{Q_PROJ}.qweight", flip)
    (error,) = verify(path, against=llama).errors
    assert (error.rule, error.where) == ("codes", f"{Q_PROJ}.qweight")
    assert "row 24, column 0" in error.message


def test_columns_in_deepcompressors_order_are_another_weight(
    llama: Path, written: Callable[[int], Path], tmp_path: Path
) -> None:
    path = copied(written(128), tmp_path / "damaged")

    def reorder(stored: torch.Tensor) -> torch.Tensor:
        # Its packer of 2025: feature 16 a + 8 b + r at 16 a + 2 r + b; OmniServe's kernel looks at 4 r + 2 a + b.
        plain = stored.view(len(stored), -1, 8, 4).transpose(-2, -1).reshape(len(stored), -1)
        return plain.view(len(stored), -1, 2, 2, 8).transpose(-2, -1).reshape(len(stored), -1)

    for leaf in ("s2_scales", "s2_zeros"):
        change_tensor(path, f"{Q_PROJ}.{leaf}", reorder)
    assert {error.where for error in verify(path, against=llama).errors} == {f"{Q_PROJ}.qweight"}


def test_level_one_outside_of_int8(written: Callable[[int], Path], tmp_path: Path) -> None:
    path = copied(written(128), tmp_path / "damaged")
    change_tensor(path, f"{Q_PROJ}.s2_zeros", lambda old: packed_groups(torch.full((128, 1), 100)))
    (error,) = verify(path).errors
    assert (error.rule, error.where) == ("level one", f"{Q_PROJ}.qweight")
    assert "row 0, group 0" in error.message


@pytest.mark.parametrize(
    ("size", "leaf"), [(128, "s1_scales"), (128, "s2_scales"), (128, "s2_zeros"), (-1, "s1_szeros")]
)
def test_a_missing_partner(size: int, leaf: str, written: Callable[[int], Path], tmp_path: Path) -> None:
    path = copied(written(size), tmp_path / "damaged")
    drop(path, f"{Q_PROJ}.{leaf}")
    assert f"{Q_PROJ}.{leaf}" in {error.where for error in verify(path).errors}
    assert any(leaf in anomaly.what for anomaly in inspect(path).anomalies)


@pytest.mark.parametrize(
    ("leaf", "edit"),
    [
        ("s1_scales", torch.Tensor.float),
        ("s2_zeros", torch.Tensor.short),
        ("s2_scales", lambda old: old[:, :-1]),
        ("s1_scales", lambda old: old[:-1]),
    ],
)
def test_another_dtype_or_shape(
    leaf: str, edit: Callable[[torch.Tensor], torch.Tensor], written: Callable[[int], Path], tmp_path: Path
) -> None:
    path = copied(written(128), tmp_path / "damaged")
    change_tensor(path, f"{Q_PROJ}.{leaf}", edit)
    (error,) = verify(path).errors
    assert (error.where, "accepted: " in error.message) == (f"{Q_PROJ}.{leaf}", True)


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
def test_a_scale_that_is_none(value: float, written: Callable[[int], Path], tmp_path: Path) -> None:
    path = copied(written(-1), tmp_path / "damaged")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.s1_scales"][3] = value

    change(path, spoil)
    assert {error.where for error in verify(path).errors} == {f"{Q_PROJ}.s1_scales"}


def test_a_config_that_says_otherwise(written: Callable[[int], Path], tmp_path: Path) -> None:
    path = copied(written(128), tmp_path / "damaged")
    change_config(path, lambda config: config["quantization_config"].update(group_size=-1))
    found = verify(path)
    assert len(found.errors) == 7
    assert {error.rule for error in found.errors} == {"config"}
    assert any("config says group channel, scales are per 128" in error.message for error in found.errors)
