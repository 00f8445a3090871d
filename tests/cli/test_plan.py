from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.run import halfbyte
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("plan"))


def test_a_table_and_who_wins(model: Path) -> None:
    ran = halfbyte("plan", model, "--batch", "1,2048")
    assert ran.code == 0
    assert "w4a8-int8" in ran.out
    assert "of its time" in ran.out
    assert ran.err.startswith("note: estimated from other shapes: ")


def test_json(model: Path) -> None:
    found = halfbyte("plan", model, "--batch", "64,1,64", "--json").json
    assert found["gpu"] == "H200"
    assert found["tokens"] == [1, 64]
    assert set(found["linear_ms"]) == {"bf16", "fp8", "w4a16", "w4a8", "w4a8-int8"}
    for index, name in enumerate(found["fastest"]):
        assert found["linear_ms"][name][index] == min(ms[index] for ms in found["linear_ms"].values())
    assert sum(product["count"] for product in found["products"]) == 8
    assert found["comparisons"]["w4a8-int8 against w4a8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "A100"), "no products were measured on the GPU A100; measured: H200"),
        (("--batch", "1,x"), "--batch '1,x'; accepted: numbers up to"),
    ],
)
def test_bad_input(model: Path, arguments: tuple[str, ...], message: str) -> None:
    ran = halfbyte("plan", model, *arguments)
    assert ran.code == 2
    assert message in ran.err
