"""What a session refuses, when it is kept, and what it needs to stay alive."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from weakref import ref

import pytest
import torch

from halfbyte.engines.transformers import cuda_graphs
from halfbyte.engines.transformers.decoding import Frame
from halfbyte.engines.transformers.fusion import fuse
from halfbyte.engines.transformers.session import Session, session
from halfbyte.errors import HalfbyteError
from tests.engines.transformers.models import PAD, PROMPT_TOKENS, generated, prompts, random_model

NEW = 8


def answers(ready: Session, tokens: int = NEW) -> torch.Tensor:
    ids, mask = prompts(padded=True)
    return torch.stack(list(ready.answer(ids, mask, max_new_tokens=tokens, pad=PAD)), dim=1)


@pytest.mark.parametrize(
    ("shape", "tokens", "message"),
    [
        ((3, 0), 1, r"^the prompt has shape \[3, 0\]; accepted: \[3, T\], of at least 1 token$"),
        ((2, 5), 1, r"^the prompt has shape \[2, 5\]; accepted: \[3, T\]"),
        ((1, 5), 1, r"^the prompt has shape \[1, 5\]"),
        ((0, 5), 1, r"^the prompt has shape \[0, 5\]"),
        ((5,), 1, r"^the prompt has shape \[5\]"),
        ((3, 200), 1, r"^a prompt of 200 tokens with 1 new ones does not fit; accepted: 128 together"),
        ((3, 128), 1, r"^a prompt of 128 tokens with 1 new"),
        ((3, 128), 0, r"^a prompt of 128 tokens with 0 new"),
        ((3, 120), 9, r"^a prompt of 120 tokens with 9 new"),
    ],
)
def test_prompts_that_do_not_fit(shape: tuple[int, ...], tokens: int, message: str) -> None:
    ready = Session(random_model("llama"), Frame(3, 128))
    with pytest.raises(HalfbyteError, match=message):
        ready.answer(torch.zeros(shape, dtype=torch.int64), max_new_tokens=tokens)


def test_a_mask_of_another_shape() -> None:
    ready, (ids, mask) = Session(random_model("llama"), Frame(3, 128)), prompts()
    with pytest.raises(
        HalfbyteError, match=r"^the mask has shape \[3, 8\]; accepted: the prompt's, \[3, 9\]$"
    ):
        ready.answer(ids, mask[:, 1:], max_new_tokens=1)


def test_every_slot_can_be_used() -> None:
    model, (ids, mask) = random_model("llama"), prompts(padded=True)
    ready = Session(model, Frame(3, PROMPT_TOKENS + NEW))
    assert torch.equal(answers(ready), generated(model, ids, mask, NEW))


@pytest.mark.parametrize(("batch", "length"), [(0, 128), (3, 0), (-1, 128)])
def test_frames_without_room(batch: int, length: int) -> None:
    with pytest.raises(
        HalfbyteError, match=rf"^cannot decode {batch} prompts in {length} tokens; accepted: "
    ):
        Frame(batch, length)


def test_a_session_ends_when_attention_runs_in_another_way() -> None:
    model, (ids, mask) = random_model("llama"), prompts(padded=True)
    first = session(model, 3, PROMPT_TOKENS + NEW)
    model.set_attn_implementation("eager")
    second = session(model, 3, PROMPT_TOKENS + NEW)
    assert second is not first
    assert torch.equal(answers(second), generated(model, ids, mask, NEW))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_inference_mode_leaves_no_trace(first: Callable[[], torch.inference_mode], fused: bool) -> None:
    model, (ids, mask) = random_model("llama"), prompts(padded=True)
    want = generated(model, ids, mask, NEW)
    if fused:
        fuse(model)
    with first():
        ready = session(model, 3, PROMPT_TOKENS + NEW)
        assert torch.equal(answers(ready), want)
        coming = ready.answer(ids.clone(), mask.clone(), max_new_tokens=NEW, stop=[int(want[0, 2])])
        next(coming)
    assert len(list(coming)) == NEW - 1
    assert session(model, 3, PROMPT_TOKENS + NEW) is ready
    assert torch.equal(answers(ready), want)


def test_a_graph_keeps_what_its_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph is replayed it reads memory; so whoever has the one has the other. The graph itself needs a GPU."""
    monkeypatch.setattr(cuda_graphs, "_capture", lambda step, device: SimpleNamespace(replay=step))
    inputs = torch.ones(3)
    alive = ref(inputs)
    step = cuda_graphs.captured(lambda x=inputs: x.add(1), torch.device("cpu"))
    del inputs
    gc.collect()
    step()
    step.graph.replay = None
    gc.collect()
    assert alive() is not None
