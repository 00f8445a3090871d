"""What ``verify`` and ``inspect`` say of mixtures in SGLang's w4afp8, decoded by the audit's own decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from halfbyte.audit.declared import declared
from halfbyte.audit.decode import WeightDecoder
from halfbyte.audit.inspect import inspect
from halfbyte.audit.modules import gather
from halfbyte.audit.verify import verify
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.quantization import job
from halfbyte.recipe import Recipe
from tests.audit.tamper import change, change_config, change_tensor, copied, drop
from tests.checkpoint.files import CONFIG, write_checkpoint
from tests.tiny import tiny_model

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
DENSE = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("deepseek_v3", tmp_path_factory.mktemp("audit-w4afp8"))


@pytest.fixture(scope="module")
def written(source: Path) -> Path:
    """Made once; not to be changed."""
    job.run(job.prepare(source, Recipe(format="w4afp8")), source.parent / "out")
    return source.parent / "out"


def test_codes_by_hand(tmp_path: Path) -> None:
    # 0x1F: -1 in the low half, the even input, and 1; 0x87: 7 and -8. See tests/checkpoint/test_w4afp8.py.
    weight = torch.zeros(2, 128, dtype=torch.uint8)
    weight[1, :2] = torch.tensor([0x1F, 0x87])
    weight[1, 64] = 0x0F
    stored = {
        f"{EXPERT}.weight": weight.view(torch.int8),
        f"{EXPERT}.weight_scale_inv": torch.tensor([[1.0, 1.0], [0.5, 8.0]]),
        f"{EXPERT}.input_scale": torch.tensor([4.0]),
    }
    config = {**CONFIG, "quantization_config": {"quant_method": "w4afp8"}}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, {"model.safetensors": stored}, config=config))
    (module,) = gather(checkpoint.tensors, declared(checkpoint.config)).modules
    assert module.stored.faults == ()
    found = np.concatenate(
        [
            tiles.scaled(tiles.by_tile(tiles.table.value_of(tiles.codes))).reshape(len(tiles.codes), -1)
            for tiles in WeightDecoder(checkpoint, module).chunks()
        ]
    )
    want = np.zeros((2, 256), np.float32)
    want[1, :4] = -0.5, 0.5, 3.5, -4.0
    want[1, 128] = -8.0
    assert np.array_equal(found, want)


def test_what_is_written_passes(source: Path, written: Path) -> None:
    found = verify(written, against=source)
    assert [finding for finding in found.findings if finding.level != "ok"] == []
    assert {weight.layout for weight in found.weights} == {"w4afp8", "fp8-block"}
    experts = [weight for weight in found.weights if weight.layout == "w4afp8"]
    assert len(experts) == 12
    assert all(0.05 < weight.relative_error < 0.16 for weight in experts)  # type: ignore[operator]


def test_inspect_explains_it(written: Path) -> None:
    found = inspect(written)
    assert (found.format, found.anomalies) == ("w4afp8 (w4afp8)", [])
    kinds = {row.name: row.kind for row in found.rows}
    expert, dense = kinds[EXPERT], kinds[DENSE]
    assert (expert.layout, expert.role, expert.scheme, expert.element, expert.group, expert.shape) == (
        *("w4afp8", "expert", "W4A8", "int4", "128"),
        (128, 128),
    )
    assert (dense.layout, dense.scheme, dense.group) == ("fp8-block", "W8A8", "128x128")
    assert not kinds["lm_head"].quantized


def test_input_scales_named_after_shards_are_no_orphans(written: Path, tmp_path: Path) -> None:
    shards = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    path = copied(written, tmp_path / "renamed")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".input_scale")]:
            *rest, projection, leaf = name.split(".")
            tensors[".".join([*rest, shards[projection], leaf])] = tensors.pop(name)

    change(path, rename)
    assert inspect(path).anomalies == []
    assert verify(path).passed


# Damage: each must be seen, and the tensor named


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (lambda path: drop(path, f"{EXPERT}.input_scale"), f"{EXPERT}.input_scale"),
        (lambda path: drop(path, f"{EXPERT}.weight_scale_inv"), EXPERT),
        (lambda path: change_tensor(path, f"{EXPERT}.input_scale", lambda t: t * 0), f"{EXPERT}.input_scale"),
        (
            lambda path: change_tensor(path, f"{EXPERT}.weight_scale_inv", lambda t: t * torch.inf),
            f"{EXPERT}.weight_scale_inv",
        ),
        (lambda path: change_tensor(path, f"{EXPERT}.weight_scale_inv", lambda t: t.repeat(1, 2)), EXPERT),
        (lambda path: change_tensor(path, f"{EXPERT}.weight", lambda t: torch.cat([~t[:1], t[1:]])), EXPERT),
        (lambda path: change_tensor(path, f"{EXPERT}.weight", lambda t: (t << 4) | ((t >> 4) & 15)), EXPERT),
    ],
)
def test_damage_is_seen(
    damage: Callable[[Path], None], where: str, source: Path, written: Path, tmp_path: Path
) -> None:
    path = copied(written, tmp_path / "damaged")
    damage(path)
    found = verify(path, against=source)
    assert not found.passed
    assert any(where in finding.where for finding in found.findings if finding.level == "error"), (
        found.findings
    )


def test_groups_of_64_are_an_anomaly(written: Path, tmp_path: Path) -> None:
    # SGLang's kernel takes any groups for those of 128, and answers wrongly.
    path = copied(written, tmp_path / "halves")
    change_tensor(path, f"{EXPERT}.weight_scale_inv", lambda t: t.repeat(1, 2))
    assert any("128" in anomaly.what for anomaly in inspect(path).anomalies if EXPERT in anomaly.where)


def test_another_method_in_config_is_a_contradiction(written: Path, tmp_path: Path) -> None:
    path = copied(written, tmp_path / "said")
    change_config(
        path,
        lambda config: config.update(
            quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
        ),
    )
    assert inspect(path).anomalies


def test_vllm_does_not_read_it(written: Path) -> None:
    assert verify(written).vllm is None
    assert not verify(written, require_vllm=True).passed
