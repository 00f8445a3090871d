from __future__ import annotations

import pytest

from halfbyte.engines.transformers.generation import encode_prompt, generate
from halfbyte.engines.transformers.loading import load
from halfbyte.errors import HalfbyteError
from tests.engines.checkpoints import Checkpoints

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[go]{% endif %}"
)


@pytest.fixture(scope="module")
def loaded(checkpoints: Checkpoints):
    return load(checkpoints.quantized("llama", "w4a8"))


def test_it_is_what_the_model_generates(loaded) -> None:
    model, tokenizer = loaded
    pieces: list[str] = []
    result = generate(model, tokenizer, "Half a byte", max_new_tokens=12, on_text=pieces.append)
    ids = tokenizer("Half a byte", return_tensors="pt")
    want = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, 11:]
    assert result.text == tokenizer.decode(want, skip_special_tokens=True)
    assert (result.prompt_tokens, result.new_tokens) == (11, len(want))
    assert "".join(pieces) == result.text
    assert result.ttft_ms > 0
    assert result.tpot_ms is not None
    assert result.tokens_per_s == pytest.approx(1e3 / result.tpot_ms)


def test_one_token_has_no_time_per_token(loaded) -> None:
    result = generate(*loaded, "a", max_new_tokens=1)
    assert (result.new_tokens, result.tpot_ms, result.tokens_per_s) == (1, None, None)


def test_sampling_is_repeatable_and_greedy_is_not_sampling(loaded) -> None:
    texts = [
        generate(*loaded, "a", max_new_tokens=8, temperature=2.0, seed=seed).text for seed in (1, 1, 2, 3)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1
    model, tokenizer = loaded
    model.generation_config.do_sample = True
    model.generation_config.temperature = 5.0
    assert len({generate(model, tokenizer, "a", max_new_tokens=8).text for _ in range(3)}) == 1


def test_the_chat_template_is_used_where_there_is_one(loaded) -> None:
    tokenizer = loaded[1]
    raw = encode_prompt(tokenizer, "hi", None)
    assert tokenizer.decode(raw["input_ids"][0]) == "hi"
    with pytest.raises(HalfbyteError, match="no chat template"):
        encode_prompt(tokenizer, "hi", True)
    tokenizer.chat_template = TEMPLATE
    try:
        assert tokenizer.decode(encode_prompt(tokenizer, "hi", None)["input_ids"][0]) == "[user]hi[go]"
        assert tokenizer.decode(encode_prompt(tokenizer, "hi", False)["input_ids"][0]) == "hi"
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt has no tokens"),
        ("a", {"max_new_tokens": 0}, "at least 1, not 0"),
        ("a", {"temperature": -1.0}, "temperature must be 0, or 0.001 or above, not -1.0"),
        ("a", {"temperature": 1e-300}, "not 1e-300"),
        ("a", {"temperature": 1.0, "seed": 10**23}, "seed must be between 0 and"),
        ("a\udcff", {}, "is not UTF-8"),
        ("a", {"temperature": float("nan")}, "not nan"),
        ("a" * 500, {"max_new_tokens": 20}, "500 tokens of prompt and 20 new ones are more than the 512"),
    ],
)
def test_bad_input(prompt: str, options: dict, message: str, loaded) -> None:
    with pytest.raises(HalfbyteError, match=message):
        generate(*loaded, prompt, **options)
