"""Statistics taken block by block, against plain hooks on the whole model and experts written out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import silu

from halfbyte.calibration.blocks import BlockModel
from halfbyte.calibration.loaded_block import Sample
from halfbyte.calibration.observers import Observation, Observer
from halfbyte.calibration.statistics import InputStatistics
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe
from halfbyte.models.layout import Role
from halfbyte.models.names import layer_index
from tests.calibration.running import run
from tests.tiny import EXPERTS, FAMILIES, tiny_model

LENGTHS = (70, 9, 30)
MOE = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "llama4_text", "deepseek_v3"]
BLOCK = 1
IN_BLOCK = f"layers.{BLOCK}."


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp("models"), torch.float32)


@pytest.fixture(scope="module", params=MOE)
def moe_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp("models"), torch.float32)


class Reference:
    """Inputs of every module of the whole model, one list entry per sample, masked rows already gone."""

    @torch.no_grad()
    def __init__(self, path: Path, masked: bool) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.inputs: dict[str, list[torch.Tensor]] = {}
        self.arguments: dict[str, list[tuple[Any, ...]]] = {}
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(
                lambda _, arguments, name=name: self.arguments.setdefault(name, []).append(arguments)
            )
        self.counts = [counts_of(length) if masked else None for length in LENGTHS]
        for index, length in enumerate(LENGTHS):
            self.model(tokens(length, index), use_cache=False)

    def rows(self, name: str, argument: int = 0) -> torch.Tensor:
        """Counted rows of one argument of module ``name`` over all samples."""
        return torch.cat(
            [
                flat if counts is None else flat[counts]
                for arguments, counts in zip(self.arguments[name], self.counts, strict=True)
                for flat in [arguments[argument].reshape(-1, arguments[argument].shape[-1])]
            ]
        )


def tokens(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


def counts_of(length: int) -> torch.Tensor:
    return torch.arange(length) % 3 != 0


def observed(path: Path, names: Iterable[str] | None = None, *, masked: bool = False) -> Observation:
    """All samples through the blocks up to ``BLOCK``, which is observed."""
    checkpoint = Checkpoint.open(path)
    layout = describe(checkpoint.config, checkpoint.shapes)
    model = BlockModel.open(checkpoint, layout)
    ids = [tokens(length, index) for index, length in enumerate(LENGTHS)]
    hidden = [model.enter(sample) for sample in ids]
    for index in range(BLOCK):
        with model.block(index) as block:
            hidden = [run(block, states, sample) for states, sample in zip(hidden, ids, strict=True)]
    with model.block(BLOCK) as block:
        if names is None:
            quantizable = {module.name for module in layout.modules if module.role.quantizable}
            names = [name for name in block.modules if name in quantizable]
        return block.observe(
            names,
            [
                Sample(states, sample, f"sample {index}", counts_of(sample.shape[1]) if masked else None)
                for index, (states, sample) in enumerate(zip(hidden, ids, strict=True))
            ],
        )


def assert_moments_of(statistics: InputStatistics, rows: torch.Tensor) -> None:
    rows = rows.double()
    assert statistics.tokens == len(rows)
    close = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(statistics.moment, rows.T @ rows / len(rows), **close)
    torch.testing.assert_close(statistics.absmean, rows.abs().mean(0), **close)
    torch.testing.assert_close(statistics.absmax, rows.abs().amax(0), **close)


def by_name(observation: Observation) -> dict[str, InputStatistics]:
    return {name: group.statistics for group in observation.groups for name in group.names}


@pytest.mark.parametrize("masked", [False, True])
def test_linears_have_the_statistics_that_plain_hooks_find(path: Path, masked: bool) -> None:
    checkpoint = Checkpoint.open(path)
    layout = describe(checkpoint.config, checkpoint.shapes)
    reference = Reference(path, masked)
    found = by_name(observed(path, masked=masked))
    linears = [
        module.name
        for module in layout.modules
        if module.role is Role.LINEAR and layer_index(module.name) == BLOCK
    ]
    assert len(linears) >= 4
    for name in linears:
        assert_moments_of(found[name], reference.rows(name))


@pytest.mark.parametrize("masked", [False, True])
def test_every_expert_sees_every_counted_token(moe_path: Path, masked: bool) -> None:
    checkpoint = Checkpoint.open(moe_path)
    layout = describe(checkpoint.config, checkpoint.shapes)
    experts = {
        module.name: checkpoint.load_source(module.source)
        for module in layout.modules
        if module.role is Role.EXPERT and IN_BLOCK in module.name
    }
    reference = Reference(moe_path, masked)
    module = next(
        name
        for name, module in reference.model.named_modules()
        if IN_BLOCK in name and type(module).__name__.endswith("Experts")
    )
    scaled = layout.family == "llama4_text"  # these get one copy of the tokens each, scaled by the router
    inputs = reference.rows(module.rpartition(".")[0] if scaled else module)
    observation = observed(moe_path, masked=masked)
    found = by_name(observation)
    for index in range(EXPERTS):
        (prefix,) = {name.rpartition(".")[0] for name in experts if f".experts.{index}." in name}
        gate, up, down = (
            ("w1", "w3", "w2") if layout.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        )
        assert_moments_of(found[f"{prefix}.{gate}"], inputs)
        assert_moments_of(found[f"{prefix}.{up}"], inputs)
        gated = inputs @ experts[f"{prefix}.{gate}"].T
        upper = inputs @ experts[f"{prefix}.{up}"].T
        if layout.family == "gpt_oss":
            bias = reference.model.get_submodule(module).gate_up_proj_bias[index].detach()
            gated = (gated + bias[::2]).clamp(max=7.0)
            upper = (upper + bias[1::2]).clamp(-7.0, 7.0)
            inner = (upper + 1) * gated * torch.sigmoid(1.702 * gated)
        else:
            inner = silu(gated) * upper
        assert_moments_of(found[f"{prefix}.{down}"], inner)
    (routed,) = observation.routed_tokens.values()
    if scaled:
        router = reference.model.get_submodule(f"{module.rpartition('.')[0]}.router")
        chosen = (inputs @ router.weight.detach().T).argmax(-1)
    else:
        chosen = reference.rows(module, 1)
    assert routed == [int((chosen == index).sum()) for index in range(EXPERTS)]


def test_experts_share_what_reads_the_hidden_state(tmp_path: Path) -> None:
    observation = observed(tiny_model("mixtral", tmp_path, torch.float32))
    outer = [f"model.layers.1.block_sparse_moe.experts.{index}" for index in range(EXPERTS)]
    groups = {frozenset(group.names) for group in observation.groups}
    assert groups == {
        frozenset(f"model.layers.1.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")),
        frozenset({"model.layers.1.self_attn.o_proj"}),
        frozenset(f"{expert}.{part}" for expert in outer for part in ("w1", "w3")),
        *(frozenset({f"{expert}.w2"}) for expert in outer),
    }
    assert list(observation.routed_tokens) == ["model.layers.1.block_sparse_moe.experts"]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"}),
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        ("opt", {"q_proj k_proj v_proj", "out_proj", "fc1", "fc2"}),
    ],
)
def test_layers_with_one_input_are_one_group(family: str, expected: set[str], tmp_path: Path) -> None:
    observation = observed(tiny_model(family, tmp_path, torch.float32))
    found = [" ".join(name.rpartition(".")[2] for name in group.names) for group in observation.groups]
    assert set(map(frozenset, map(str.split, found))) == set(map(frozenset, map(str.split, expected)))


def test_shared_experts_join_the_experts_input(tmp_path: Path) -> None:
    observation = observed(tiny_model("deepseek_v3", tmp_path, torch.float32))
    (group,) = [
        group for group in observation.groups if "model.layers.1.mlp.experts.0.up_proj" in group.names
    ]
    assert "model.layers.1.mlp.shared_experts.gate_proj" in group.names
    assert group.statistics.tokens == sum(LENGTHS)


def test_chosen_modules_alone_are_observed(tmp_path: Path) -> None:
    path = tiny_model("mixtral", tmp_path, torch.float32)
    name = "model.layers.1.block_sparse_moe.experts.2.w2"
    everything = by_name(observed(path))
    (group,) = observed(path, [name]).groups
    assert group.names == (name,)
    # Alone and among others it may be multiplied in another order: some processors' libraries do that.
    torch.testing.assert_close(group.statistics.moment, everything[name].moment, rtol=1e-5, atol=1e-6)


def test_hooks_leave_the_output_alone_and_go(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_model("mixtral", tmp_path, torch.float32))
    model = BlockModel.open(checkpoint, describe(checkpoint.config, checkpoint.shapes))
    ids = tokens(20, 0)
    hidden = model.enter(ids)
    with model.block(0) as block:
        before = run(block, hidden, ids)
        block.observe(block.modules[:3], [Sample(hidden, ids, "one")])
        assert torch.equal(run(block, hidden, ids), before)
        hooks = [module for module in block._model.modules() if module._forward_pre_hooks]
        assert not hooks


def test_a_layer_that_never_runs_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_model("llama", tmp_path, torch.float32))
    model = BlockModel.open(checkpoint, describe(checkpoint.config, checkpoint.shapes))
    with (
        model.block(0) as block,
        pytest.raises(HalfbyteError, match=r"layers\.0\..*q_proj: .*without calling it"),
    ):
        block.observe(["model.layers.0.self_attn.q_proj"], [])


def test_ranks_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("mixtral", tmp_path, torch.float32)
    alone = observed(path)

    def two_equal_ranks(total: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        if op == torch.distributed.ReduceOp.SUM:
            total.mul_(2)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", two_equal_ranks)
    both = observed(path)
    for one, two in zip(alone.groups, both.groups, strict=True):
        assert two.statistics.tokens == 2 * one.statistics.tokens
        torch.testing.assert_close(two.statistics.moment, one.statistics.moment)
    for parent, routed in alone.routed_tokens.items():
        assert both.routed_tokens[parent] == [2 * count for count in routed]


def test_rows_that_are_not_tokens_cannot_be_masked() -> None:
    layer = torch.nn.Linear(4, 4)
    with Observer({"layer": 4}, {"layer": layer}, [], []) as observer, torch.no_grad():
        observer.expect(torch.tensor([True, False, True]))
        with pytest.raises(HalfbyteError, match="layer: reads 6 rows for 3 tokens"):
            layer(torch.zeros(6, 4))


def test_a_tensor_changed_in_place_is_another_input() -> None:
    first, second, values = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2), torch.ones(3, 4)
    with (
        Observer({"first": 4, "second": 4}, {"first": first, "second": second}, [], []) as observer,
        torch.no_grad(),
    ):
        observer.expect(None)
        first(values)
        second(values.mul_(2))
    one, two = observer.observation().groups
    assert (one.names, two.names) == (("first",), ("second",))
    assert_moments_of(one.statistics, torch.ones(3, 4))
    assert_moments_of(two.statistics, torch.full((3, 4), 2.0))
