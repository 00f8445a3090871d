"""Several weights, each for tokens of its own, on a Hopper GPU: every row is what its expert's layer gives alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import pytest
import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.quantize import quantize
from halfbyte.kernels.hopper.routes import expert_routes
from halfbyte.kernels.hopper_experts import HopperExperts, PreparedExperts, experts_of
from halfbyte.kernels.problem import LinearProblem, Prepared
from halfbyte.kernels.reference import exact_weight
from halfbyte.kernels.registry import kernel_named
from halfbyte.kernels.routes import HEIGHTS, Routes, first_runs, route, tile_heights
from halfbyte.schemes import PRESETS

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
W4A8, W4A16 = (
    replace(PRESETS[name], weights=PRESETS[name].weights.with_scale("bf16")) for name in ("w4a8", "w4a16")
)
KERNELS = {
    "hopper-w4a8": W4A8,
    "hopper-w4a8-fp32-sums": W4A8,
    "hopper-w4a8-fp8-scales": W4A8,
    "hopper-w4a16": W4A16,
    "hopper-w4a8-int8": PRESETS["w4a8-int8"],
    "hopper-fp8": replace(PRESETS["fp8"], weights=PRESETS["fp8"].weights.with_scale("f32")),
}


@dataclass(frozen=True)
class Case:
    """Experts of one kernel, and each of them as a layer."""

    name: str
    experts: int
    n: int
    k: int
    dtype: torch.dtype = BF16
    group: int = 128

    @cached_property
    def kernel(self) -> HopperExperts:
        found = experts_of(self.name)
        assert found is not None
        return found

    @cached_property
    def layers(self) -> list[Prepared]:
        preset = KERNELS[self.name]
        grouped = preset.weights.granularity == "group"
        scheme = replace(preset, weights=preset.weights.with_group_size(self.group)) if grouped else preset
        problem = LinearProblem(scheme, self.n, self.k, GPU, self.dtype)
        generator = torch.Generator(GPU).manual_seed(self.n + self.k)
        weights = [torch.randn(self.n, self.k, device=GPU, generator=generator) for _ in range(self.experts)]
        linear = kernel_named(self.name)
        return [linear.prepare(quantize(weight * 0.05, scheme.weights), problem) for weight in weights]

    @cached_property
    def prepared(self) -> PreparedExperts:
        return self.kernel.stack(self.layers)

    def check(self, ids: torch.Tensor, heights: Sequence[int], bias: torch.Tensor | None = None) -> None:
        """All routed rows against the layers, one by one."""
        routes = expert_routes(ids.to(GPU), self.experts, heights)
        same(routes, route(ids, self.experts, heights), ids.numel(), self.experts, heights)
        x = torch.randn(ids.numel(), self.k, device=GPU, dtype=self.dtype)
        x[int(routes.offsets[-1]) :] = float("nan")  # rows of nobody
        out = self.run(x, routes, heights, bias)
        for expert, layer in enumerate(self.layers):
            rows = slice(*routes.offsets[expert : expert + 2].tolist())
            of_expert = None if bias is None else bias[expert]
            wanted = kernel_named(self.name).run(x[rows], layer, of_expert).double()
            # The same numbers, added up in another order where tiles are cut in another way.
            size = float(wanted.abs().mean()) if wanted.numel() else 0.0
            torch.testing.assert_close(out[rows].double(), wanted, rtol=2**-7, atol=size * 0.05)

    def run(
        self, x: torch.Tensor, routes: Routes, heights: Sequence[int], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.kernel.run(self.kernel.rows(x, self.prepared), self.prepared, routes, heights, bias)


@cache
def case(
    name: str, experts: int = 6, n: int = 512, k: int = 768, dtype: torch.dtype = BF16, group: int = 128
) -> Case:
    return Case(name, experts, n, k, dtype, group)


def same(found: Routes, wanted: Routes, rows: int, experts: int, heights: Sequence[int]) -> None:
    for name in ("place", "origin", "offsets", "tiles"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name
    begins = first_runs(rows, experts, heights)
    for h, count in enumerate(wanted.tiles.tolist()):
        of_height = slice(begins[h], begins[h] + count)
        assert torch.equal(found.runs[of_height].cpu(), wanted.runs[of_height])


def drawn(tokens: int, top_k: int, experts: int, skew: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    chances = (1 / torch.arange(1, experts + 1) ** skew).expand(max(tokens, 1), experts)
    return torch.multinomial(chances, top_k, generator=generator)[:tokens]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("heights", [[h] for h in HEIGHTS] + [[32, 128], [8, 64]], ids=str)
def test_every_height(name: str, heights: list[int]) -> None:
    for tokens in (1, 5, 40, 333):
        case(name).check(drawn(tokens, 2, 6, skew=1.0), heights)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_are_what_float64_says(name: str) -> None:
    """Codes of inputs and weights times their scales; FP8 group scales and sums in fp16 cost digits of their own."""
    of_kernel = case(name)
    routes = expert_routes(drawn(90, 2, 6).to(GPU), 6, [32])
    x = torch.randn(180, 768, device=GPU, dtype=BF16)
    out = of_kernel.run(x, routes, [32]).double()
    activations = KERNELS[name].activations
    inputs = x.double()
    if activations is not None:
        codes, scales = quantize_activations(x, activations)
        inputs = codes.double() * scales.double()
    for expert, layer in enumerate(of_kernel.layers):
        rows = slice(*routes.offsets[expert : expert + 2].tolist())
        wanted = inputs[rows] @ exact_weight(kernel_named(name).restore(layer)).T
        allowed = 0.06 if name == "hopper-w4a8-fp8-scales" else 3e-3
        assert (out[rows] - wanted).norm() <= allowed * wanted.norm()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(16, 64, 64), (1040, 1280, 128), (1536, 2048, 128), (64, 192, 64), (80, 320, 32)]
)
def test_shapes_that_splitting_leaves(name: str, n: int, k: int, group: int) -> None:
    if group < 128 and name == "hopper-w4a8-fp8-scales":
        pytest.skip("its groups are of 128")
    of_shape = case(name, 5, n, k, BF16, group)
    for tokens in (1, 2, 17, 300):
        of_shape.check(drawn(tokens, 3, 5), tile_heights(tokens, 3, 5))


@pytest.mark.parametrize("name", KERNELS)
def test_adversarial_routings(name: str) -> None:
    of_kernel = case(name)
    for ids in (
        torch.full((100, 1), 3),  # all to one
        torch.arange(6)[:, None],  # each to another
        torch.full((9, 2), -1),  # nobody's
        torch.full((9, 3), 2),  # the same again
        torch.tensor([[0, -1], [7, 6], [5, 5], [-5, 0]]),
        torch.cat([torch.zeros(129, 1), torch.full((1, 1), 5.0)]).long(),
        torch.zeros(0, 2, dtype=torch.int64),
    ):
        for heights in ([8], [16], [32, 128]):
            of_kernel.check(ids, heights)
            of_kernel.check(ids.int(), heights)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_biases_of_experts_in_both_dtypes(name: str, dtype: torch.dtype) -> None:
    of_kernel = case(name, dtype=dtype)
    bias = torch.randn(6, 512, device=GPU, dtype=dtype)
    for tokens in (3, 200):
        of_kernel.check(drawn(tokens, 2, 6), tile_heights(tokens, 2, 6), bias)


@pytest.mark.parametrize("name", KERNELS)
def test_nan_stays_in_its_row(name: str) -> None:
    of_kernel = case(name)
    for tokens in (8, 90, 700):
        ids, heights = drawn(tokens, 2, 6), tile_heights(tokens, 2, 6)
        routes = expert_routes(ids.to(GPU), 6, heights)
        x = torch.randn(ids.numel(), 768, device=GPU, dtype=BF16)
        clean = of_kernel.run(x, routes, heights)
        bad = int(routes.offsets[1]) + 1
        x[bad, 5] = float("nan")
        found = of_kernel.run(x, routes, heights)
        assert found[bad].isnan().all()
        others = [row for row in range(len(x)) if row != bad]
        assert torch.equal(found[others], clean[others])


def test_an_expert_whose_scales_fp16_does_not_hold() -> None:
    """Then all have them in fp32, and each comes back as it was."""
    of_kernel = case("hopper-w4a8")
    layers = list(of_kernel.layers)
    weight = torch.randn(512, 768, device=GPU)
    weight[:, :128] *= 1e-6
    layers[2] = of_kernel.kernel.linear.prepare(quantize(weight, W4A8.weights), layers[0].problem)
    assert "row_factors" not in layers[2].tensors
    prepared = of_kernel.kernel.stack(layers)
    assert "row_factors" not in prepared.stacked
    for layer, stacked in zip(layers, prepared.experts, strict=True):
        restored = of_kernel.kernel.linear.restore(stacked)
        wanted = of_kernel.kernel.linear.restore(layer)
        assert torch.equal(restored.codes, wanted.codes)
        assert torch.equal(restored.scales, wanted.scales)
    routes = expert_routes(drawn(30, 2, 6).to(GPU), 6, [16])
    x = torch.randn(60, 768, device=GPU, dtype=BF16)
    out = of_kernel.kernel.run(of_kernel.kernel.rows(x, prepared), prepared, routes, [16])
    for expert, layer in enumerate(layers):
        rows = slice(*routes.offsets[expert : expert + 2].tolist())
        wanted = kernel_named("hopper-w4a8").run(x[rows], layer)
        torch.testing.assert_close(out[rows], wanted, rtol=2**-7, atol=float(wanted.abs().mean()) * 0.05)


@pytest.mark.parametrize("experts", [512, 511, 65])
def test_many_experts(experts: int) -> None:
    for tokens, top_k in ((1, 8), (64, 8), (5000, 8), (40000, 1)):
        ids = drawn(tokens, top_k, experts)
        for heights in ([8], [8, 16, 64]):
            found = expert_routes(ids.to(GPU), experts, heights)
            same(found, route(ids, experts, heights), ids.numel(), experts, heights)


@pytest.mark.parametrize("name", KERNELS)
def test_a_graph_follows_other_routings(name: str) -> None:
    of_kernel = case(name)
    ids, x = drawn(50, 2, 6).to(GPU), torch.randn(100, 768, device=GPU, dtype=BF16)
    heights = [8, 64]

    def step() -> tuple[torch.Tensor, Routes]:
        routes = expert_routes(ids, 6, heights)
        return of_kernel.run(x, routes, heights), routes

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = step()
    for skew in (0.0, 3.0):
        ids.copy_(drawn(50, 2, 6, skew))
        graph.replay()
        wanted, routes = step()
        routed = int(routes.offsets[-1])
        assert torch.equal(captured[:routed], wanted[:routed])


def test_what_is_not_taken_is_refused() -> None:
    ids = drawn(4, 2, 6).to(GPU)
    with pytest.raises(HalfbyteError, match="ids must be int32 or int64"):
        expert_routes(ids.float(), 6, [8])
    with pytest.raises(HalfbyteError, match="at most 512 experts"):
        expert_routes(ids, 513, [8])
    of_kernel = case("hopper-w4a8-int8")
    x = torch.randn(8, 768, device=GPU, dtype=BF16)
    with pytest.raises(HalfbyteError, match="tiles of 12 tokens: accepted heights are 8, 16"):
        of_kernel.run(x, expert_routes(ids, 6, [12]), [12])
