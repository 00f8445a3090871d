"""What is found in a saved checkpoint is what transformers builds from it: every linear, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from halfbyte.models.describe import describe
from halfbyte.models.layout import ModelLayout, Role, WeightSource
from tests.tiny import EXPERTS, FAMILIES, tiny_config, tiny_model

NOT_QUANTIZED = ("lm_head", "gate", "router", "shared_expert_gate")


def described(path: Path) -> tuple[ModelLayout, dict[str, torch.Tensor]]:
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    return describe(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}), tensors


def read(source: WeightSource, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = tensors[source.tensor]
    weight = weight if source.expert is None else weight[source.expert]
    weight = weight.T if source.transposed else weight
    return weight if source.rows is None else weight[slice(*source.rows)]


def as_stored(name: str, family: str) -> str:
    """The name that ``save_pretrained`` gives a module of the model in memory."""
    return name.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else name


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    layout, tensors = described(tiny_model(family, tmp_path))
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family))
    expected: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in NOT_QUANTIZED:
            continue
        if isinstance(module, torch.nn.Linear):
            expected[as_stored(name, family)] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            expected[as_stored(name, family)] = (module.nf, module.nx)
    linears = {m.name: m.shape for m in layout.modules if m.role is Role.LINEAR}
    assert linears == expected
    for module in layout.modules:
        assert tuple(read(module.source, tensors).shape) == module.shape
    assert layout.known
    assert layout.left_out == ()
    assert layout.tied is model.config.tie_word_embeddings


@pytest.mark.parametrize("family", [f for f in FAMILIES if "expert" in " ".join(FAMILIES[f])])
def test_experts_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path, dtype=torch.float32)
    layout, tensors = described(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    experts = {m.name: read(m.source, tensors) for m in layout.modules if m.role is Role.EXPERT}
    checked = 0
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        for expert in range(EXPERTS):
            gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
            if family in ("gpt_oss", "llama4_text"):  # these multiply from the left: [in, out] in memory
                gate_up, down = gate_up.T, down.T
            gate, up = (gate_up[::2], gate_up[1::2]) if family == "gpt_oss" else gate_up.chunk(2)
            leaves = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
            for leaf, weight in zip(leaves, (gate, up, down), strict=True):
                assert torch.equal(experts[f"{as_stored(name, family)}.{expert}.{leaf}"], weight)
                checked += 1
    assert checked == len(experts) > 0
    routers = [m for m in layout.modules if m.role is Role.ROUTER and m.out_features == EXPERTS]
    assert len(routers) == checked // (3 * EXPERTS)
