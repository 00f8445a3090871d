"""Which weights are worked on as one tensor, and that each finds its own part again."""

from __future__ import annotations

import pytest
import torch

from halfbyte.algorithms.targets import ExactScales
from halfbyte.calibration.statistics import InputStatistics
from halfbyte.formats.quantize import quantize
from halfbyte.formats.spec import TensorFormat
from halfbyte.method import Method
from halfbyte.quantization import stacks
from halfbyte.quantization.stacks import Stack, stack_up

GROUPS = TensorFormat("int4", "group", 32, scale="bf16")
SHARED = TensorFormat("e2m1", "group", 16, scale="e4m3", outer="tensor")


def seen(size: int) -> InputStatistics:
    return InputStatistics(1, torch.eye(size), torch.ones(size), torch.ones(size))


def stacked(
    shapes: dict[str, tuple[int, int]],
    inputs: list[list[str]],
    formats: dict[str, TensorFormat] | None = None,
) -> list[Stack]:
    known = {
        name: statistics for names in inputs for statistics in [seen(shapes[names[0]][1])] for name in names
    }
    return stack_up(
        formats or dict.fromkeys(shapes, GROUPS),
        shapes,
        dict.fromkeys(shapes, Method.parse("gptq")),
        dict.fromkeys(shapes, ExactScales()),
        known,
    )


EXPERTS = {f"{n}.{leaf}": shape for n in range(3) for leaf, shape in (("up", (8, 64)), ("down", (64, 32)))}
UP, DOWN = [f"{n}.up" for n in range(3)], [f"{n}.down" for n in range(3)]


def test_readers_of_one_input_lie_below_each_other_and_what_is_alike_in_a_stack() -> None:
    found = stacked({**EXPERTS, "q": (16, 64), "k": (8, 64)}, [UP, ["q", "k"], *([name] for name in DOWN)])
    members = [stack.members for stack in found]
    assert members == [(tuple(UP),), (("q", "k"),), (("0.down",), ("1.down",), ("2.down",))]


def test_what_shares_scales_stays_alone() -> None:
    formats = dict.fromkeys(EXPERTS, SHARED)
    found = stacked(EXPERTS, [UP, *([name] for name in DOWN)], formats)
    assert [stack.members for stack in found] == [((name,),) for name in [*UP, *DOWN]]


def test_stacks_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_WEIGHTS_TOGETHER", 2 * 8 * 64)
    monkeypatch.setattr(stacks, "_MOMENTS_TOGETHER", 32 * 32)
    found = stacked(EXPERTS, [UP, *([name] for name in DOWN)])
    assert [stack.members for stack in found] == [
        (("0.up", "1.up"),),
        (("2.up",),),
        *(((name,),) for name in DOWN),
    ]


def test_each_finds_its_own_part() -> None:
    shapes = {"a": (8, 64), "b": (16, 64), "c": (8, 64), "d": (16, 64)}
    (stack,) = stacked(shapes, [["a", "b"], ["c", "d"]])
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    whole = stack.weight(weights.__getitem__)
    assert whole.shape == (2, 24, 64)
    quantized = quantize(whole, GROUPS)
    for name, member, rows in stack.parts():
        assert torch.equal(whole[member, rows], weights[name])
        part, alone = stack.part(quantized, member, rows), quantize(weights[name], GROUPS)
        assert torch.equal(part.codes, alone.codes)
        assert torch.equal(part.scales, alone.scales)
