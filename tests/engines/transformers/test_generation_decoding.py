"""Decoding on fixed buffers against transformers' own ``generate``."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from halfbyte.engines.transformers import decoding
from halfbyte.engines.transformers.decodable import cannot_decode
from halfbyte.engines.transformers.decoding import Decoder, Frame
from halfbyte.engines.transformers.fusion import fuse
from halfbyte.engines.transformers.session import Session, session
from tests.engines.transformers.models import PAD, PROMPT_TOKENS, NoWaiting, generated, prompts, random_model

NEW = 40
# One of each kind: rotary and learned positions, windows, norms and soft caps around attention, sinks, experts.
FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "opt",
    "gpt_neox",
    "mixtral",
    "gpt_oss",
)
WINDOW = {"sliding_window": 16}


def decoded(decoder: Decoder, tokens: int) -> torch.Tensor:
    """``[B, tokens]`` after :meth:`Decoder.read`."""
    found = [decoder.tokens.clone()]
    for _ in range(tokens - 1):
        decoder.step()
        found.append(decoder.tokens.clone())
    return torch.stack(found, dim=1)


def logits_of(decoder: Decoder, ids: torch.Tensor, mask: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """``[B, N, vocabulary]``: what the decoder chooses from while it is made to say ``given`` ``[B, N]``."""
    seen: list[torch.Tensor] = []

    class Dictation:
        def begin(self, *args: object) -> None:
            seen.clear()

        def __call__(self, logits: torch.Tensor) -> torch.Tensor:
            seen.append(logits.clone())
            return given[:, len(seen) - 1]

    decoder._choice = Dictation()  # type: ignore[assignment]
    decoder.read(ids, mask)
    for _ in range(given.shape[1] - 1):
        decoder.step()
    return torch.stack(seen, dim=1)


def forward_logits(
    model: transformers.PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, given: torch.Tensor
) -> torch.Tensor:
    """The same from one call of the model, without a cache."""
    whole = torch.cat([mask, torch.ones_like(given)], dim=1)
    with torch.no_grad():
        logits = model(
            input_ids=torch.cat([ids, given], dim=1),
            attention_mask=whole,
            position_ids=(whole.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).logits
    return logits[:, ids.shape[1] - 1 : -1]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family: str, padded: bool) -> None:
    model = random_model(family)
    ids, mask = prompts(padded)
    decoder = Decoder(model, Frame(3, 64))
    decoder.read(ids, mask)
    assert torch.equal(decoded(decoder, NEW), generated(model, ids, mask, NEW))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in FAMILIES),
        *((family, WINDOW) for family in ("mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "gpt_oss")),
    ],
)
def test_logits_are_those_of_one_call_on_the_whole_text(family: str, overrides: dict) -> None:
    """Random models like to repeat themselves; what they are given here they would not say."""
    model = random_model(family, **overrides)
    ids, mask = prompts(padded=True)
    given = torch.randint(0, 256, (3, NEW), generator=torch.Generator().manual_seed(2))
    found = logits_of(Decoder(model, Frame(3, 64)), ids, mask, given)
    torch.testing.assert_close(found, forward_logits(model, ids, mask, given), rtol=1e-3, atol=1e-4)


def test_additive_masks() -> None:
    model = random_model("llama")
    model.set_attn_implementation("eager")
    ids, mask = prompts(padded=True)
    decoder = Decoder(model, Frame(3, 64))
    decoder.read(ids, mask)
    assert torch.equal(decoded(decoder, NEW), generated(model, ids, mask, NEW))


def test_long_batches_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    ids, mask = prompts(padded=True, count=5)
    monkeypatch.setattr(decoding, "_PROMPT_TOKENS", 2 * PROMPT_TOKENS + 1)
    decoder = Decoder(model, Frame(5, 64))
    decoder.read(ids, mask)
    assert torch.equal(decoded(decoder, NEW), generated(model, ids, mask, NEW))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "opt", "gpt_neox", "phi3"])
def test_a_step_never_waits_and_its_buffers_stay(family: str, fused: bool) -> None:
    model = random_model(family)
    if fused:
        fuse(model)
    decoder = Decoder(model, Frame(2, 64, sampled=True, penalized=True))
    decoder.read(prompts(count=2)[0], temperature=1.0, penalty=1.2)
    decoder.step()
    layer = decoder._cache.layers[1]
    buffers = [decoder.tokens, decoder._slot, decoder._positions, layer.keys, layer.values]
    places = [buffer.data_ptr() for buffer in buffers]
    with NoWaiting():
        decoder.step()
    layer = decoder._cache.layers[1]
    buffers = [decoder.tokens, decoder._slot, decoder._positions, layer.keys, layer.values]
    assert [buffer.data_ptr() for buffer in buffers] == places


def test_sampling_draws_as_generate_does() -> None:
    model = random_model("llama")
    ids, mask = prompts(padded=True)
    decoder = Decoder(model, Frame(3, 64, sampled=True))
    torch.manual_seed(7)
    decoder.read(ids, mask, temperature=1.7)
    found = decoded(decoder, NEW)
    torch.manual_seed(7)
    want = generated(model, ids, mask, NEW, do_sample=True, temperature=1.7, top_k=0, top_p=None)
    assert torch.equal(found, want)
    assert not torch.equal(found, generated(model, ids, mask, NEW))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_repetition_penalty(sampled: bool) -> None:
    model = random_model("llama")
    ids, mask = prompts()
    decoder = Decoder(model, Frame(3, 64, sampled=sampled, penalized=True))
    torch.manual_seed(7)
    decoder.read(ids, mask, temperature=0.9, penalty=1.4)
    found = decoded(decoder, NEW)
    torch.manual_seed(7)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": None} if sampled else {}
    assert torch.equal(found, generated(model, ids, mask, NEW, repetition_penalty=1.4, **options))
    assert not torch.equal(found, generated(model, ids, mask, NEW, **options))


def test_a_decoder_forgets_its_last_prompt() -> None:
    model = random_model("llama")
    decoder = Decoder(model, Frame(3, 64))
    ids, mask = prompts()
    decoder.read(ids.flip(0).repeat(1, 4)[:, :20])
    for layer in decoder._cache.layers:
        layer.values[:, :, 15:] = torch.nan
    decoder.read(ids, mask)
    assert torch.equal(decoded(decoder, NEW), generated(model, ids, mask, NEW))


def answers(ready: Session, ids: torch.Tensor, mask: torch.Tensor, tokens: int, **options) -> torch.Tensor:
    return torch.stack(list(ready.answer(ids, mask, max_new_tokens=tokens, pad=PAD, **options)), dim=1)


def test_a_session_stops_where_generate_does() -> None:
    model = random_model("llama")
    ids, mask = prompts()
    free = generated(model, ids, mask, NEW)
    # Tokens that end two of the three texts, at different places, before the end.
    stop = [int(free[0, 5]), int(free[1, 11])]
    model.generation_config.eos_token_id = stop
    want = generated(model, ids, mask, NEW)
    assert (want == PAD).any(), "no text ends early, so this shows nothing"
    ready = session(model, 3, PROMPT_TOKENS + NEW)
    assert torch.equal(answers(ready, ids, mask, NEW, stop=stop), want)
    every = [*stop, int(free[2, 3])]
    model.generation_config.eos_token_id = every
    found = answers(ready, ids, mask, NEW, stop=every)
    assert found.shape[1] < NEW
    assert torch.equal(found, generated(model, ids, mask, NEW))


def test_one_new_token() -> None:
    model = random_model("llama")
    ids, mask = prompts()
    ready = session(model, 3, PROMPT_TOKENS + 1)
    assert torch.equal(answers(ready, ids, mask, 1), generated(model, ids, mask, 1))


def test_sessions_are_kept_for_prompts_of_their_shape() -> None:
    model = random_model("llama")
    first = session(model, 3, 100)
    assert session(model, 3, 128) is first
    assert session(model, 3, 129) is not first
    second = session(model, 2, 100)
    assert second is not first
    assert session(model, 2, 100, sampled=True) is not second
    assert session(copy.deepcopy(model), 2, 100) is not session(model, 2, 100)


def test_a_session_ends_when_weights_move() -> None:
    model = random_model("llama")
    first = session(model, 1, 64)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert session(model, 1, 64) is not first


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("llama", {}, ""),
        ("gemma3_text", {}, ""),
        ("gpt2", {}, ""),
        ("llama4_text", {}, "it has layers of chunked_attention"),
        ("openai-gpt", {}, "its forward takes no past_key_values"),
    ],
)
def test_which_models_can_be_decoded(family: str, overrides: dict, reason: str) -> None:
    assert cannot_decode(random_model(family, **overrides)) == reason


def test_a_cache_of_another_kind() -> None:
    """XLM has an argument of that name too, but takes a dict there."""
    config = transformers.XLMConfig(vocab_size=264, emb_dim=32, n_layers=1, n_heads=2)
    model = transformers.XLMWithLMHeadModel(config)
    assert cannot_decode(model) == "its forward takes another kind of cache"


def test_why_a_model_cannot_be_decoded() -> None:
    model = random_model("llama")
    model.generation_config.no_repeat_ngram_size = 3
    assert cannot_decode(model) == "its generation config has no_repeat_ngram_size 3"
    model.generation_config.no_repeat_ngram_size = None
    model.generation_config.repetition_penalty = 1.2
    model.generation_config.top_k = 20
    assert cannot_decode(model) == ""
    model.set_attn_implementation("flex_attention")
    assert cannot_decode(model) == "its attention runs on flex_attention"
    model.set_attn_implementation("sdpa")
    model.model.layers[1].to("meta")
    assert cannot_decode(model) == "it lies on several devices"
