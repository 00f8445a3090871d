"""Who takes part, and one of them on the CPU, where torch multiplies groups too."""

from __future__ import annotations

import pytest
import torch

from halfbyte.bench.experts import ours
from halfbyte.bench.experts.contender import relative_error
from halfbyte.bench.experts.mixtures import Mixture
from halfbyte.bench.experts.operands import Stack
from halfbyte.bench.experts.run import Request, contenders
from halfbyte.bench.kernels.contender import MissingError
from halfbyte.bench.kernels.peers import Peers
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.hopper_experts import experts_of
from halfbyte.schemes import PRESETS

CPU = torch.device("cpu")
SMALL = Mixture(experts=10, top_k=3, hidden=256, intermediate=128)


def names(*patterns: str) -> list[str]:
    return [contender.name for contender in contenders(Request(kernels=patterns), Peers(None))]


def test_patterns_choose() -> None:
    assert names() == [*names("hopper-*"), *names("torch-*"), *names("humming-*"), *names("vllm-*")]
    assert names("hopper-w4a8", "torch-fp8-*") == ["hopper-w4a8", "torch-fp8-rowwise"]
    with pytest.raises(HalfbyteError, match="--kernels 'marlin'; accepted: hopper-w4a8, "):
        names("marlin")


def test_ours_are_kernels_of_the_presets_that_they_are_timed_with() -> None:
    for name, scheme in ours.OURS.items():
        assert experts_of(name) is not None
        assert scheme in PRESETS


@pytest.mark.parametrize("gemm", ["gate-up", "down"])
def test_torch_on_the_cpu(gemm: str) -> None:
    stack = Stack(SMALL, gemm, CPU)
    (loaded,) = (c.load(stack) for c in ours.contenders() if c.name == "torch-bf16")
    assert loaded.nbytes == 10 * stack.shape[0] * stack.shape[1] * 2
    assert len(loaded.copies) == 2
    for tokens in (1, 30):
        (routing,) = stack.routings(tokens, "zipf", 1)
        room = torch.empty(tokens * 3, stack.shape[0], dtype=torch.bfloat16)
        result = loaded.call(loaded.copies[1], loaded.feed(routing), room)
        assert relative_error(result, loaded, routing) < 5e-3


def test_hopper_kernels_say_why_they_are_missing_here() -> None:
    with pytest.raises(MissingError, match="runs on NVIDIA GPUs"):
        ours.hopper("hopper-w4a8", "w4a8", Stack(SMALL, "down", CPU))
