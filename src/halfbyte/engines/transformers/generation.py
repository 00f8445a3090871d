"""Generating text from one prompt, with the times that count: to the first token, and per token after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from halfbyte.engines.transformers.decodable import cannot_decode
from halfbyte.engines.transformers.session import session
from halfbyte.errors import HalfbyteError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """text: of the new tokens, special ones left out. ttft_ms: time to the first token, reading the prompt included.

    tpot_ms: mean time per token after the first; none if there is only one. tokens_per_s: the same as a rate.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    ttft_ms: float
    tpot_ms: float | None

    @property
    def tokens_per_s(self) -> float | None:
        return 1e3 / self.tpot_ms if self.tpot_ms else None

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.ttft_ms * 1e3


# Below it the quotients leave fp32's range; the likeliest token is all that is left long before.
LOWEST_TEMPERATURE = 1e-3


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int | None = None,
    chat: bool | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Up to ``max_new_tokens`` after ``prompt``.

    temperature: 0 always takes the likeliest token; above, it samples from the whole vocabulary.
    chat: put the prompt in the tokenizer's chat template, as the user's turn; if there is one, unless given.
    on_text: called with each piece of text as it is made.
    Errors: numbers out of range; a chat without a template; a prompt without tokens, or too long for the
    model.
    """
    if max_new_tokens < 1:
        raise HalfbyteError(f"max new tokens must be at least 1, not {max_new_tokens}")
    if temperature != 0 and not LOWEST_TEMPERATURE <= temperature < float("inf"):
        raise HalfbyteError(f"temperature must be 0, or {LOWEST_TEMPERATURE} or above, not {temperature}")
    if seed is not None and not 0 <= seed < 2**63:
        raise HalfbyteError(f"seed must be between 0 and 2**63 - 1, not {seed}")
    inputs = encode_prompt(tokenizer, prompt, chat)
    prompt_tokens = inputs["input_ids"].shape[1]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise HalfbyteError(
            f"{prompt_tokens} tokens of prompt and {max_new_tokens} new ones are more than the {limit} that the "
            "model can hold"
        )
    watch = _Watch(tokenizer, on_text)
    request = _Request(inputs, max_new_tokens, temperature, seed, _pad_token(model, tokenizer))
    ask = _ask_session if _decodes_itself(model) else _ask_transformers
    new_tokens, started = ask(model, request, watch)
    times = watch.times
    return Generation(
        text=tokenizer.decode(new_tokens, skip_special_tokens=True),
        prompt_tokens=prompt_tokens,
        new_tokens=len(new_tokens),
        ttft_ms=(times[0] - started) * 1e3,
        tpot_ms=(times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None,
    )


@dataclass(frozen=True)
class _Request:
    """inputs: ``input_ids`` and ``attention_mask`` ``[1, T]``. pad: any token, of which one prompt needs none."""

    inputs: dict[str, torch.Tensor]
    max_new_tokens: int
    temperature: float
    seed: int | None
    pad: int | None

    def seed_generators(self) -> None:
        if self.seed is not None:
            torch.manual_seed(self.seed)


def _decodes_itself(model: PreTrainedModel) -> bool:
    """On a GPU, where Python between kernels would take longer than the kernels, unless the model rules it out."""
    if model.device.type != "cuda":
        return False
    reason = cannot_decode(model)
    if reason:
        _note_once(f"{type(model).__name__} is decoded by transformers, without CUDA graphs: {reason}")
    return not reason


def _ask_session(model: PreTrainedModel, request: _Request, watch: _Watch) -> tuple[torch.Tensor, float]:
    """New tokens ``[N]``, and when work on the prompt began; to make the session ready comes before."""
    prompt = request.inputs["input_ids"]
    penalty = model.generation_config.repetition_penalty or 1.0
    ready = session(
        model,
        1,
        prompt.shape[1] + request.max_new_tokens,
        sampled=request.temperature > 0,
        penalized=penalty != 1.0,
    )
    request.seed_generators()
    started = time.perf_counter()
    watch.put(prompt)
    new_tokens = []
    for tokens in ready.answer(
        prompt.to(model.device),
        max_new_tokens=request.max_new_tokens,
        stop=_stop_tokens(model),
        temperature=request.temperature,
        penalty=penalty,
    ):
        watch.put(tokens)
        new_tokens.append(tokens)
    watch.end()
    return torch.cat(new_tokens), started


def _ask_transformers(model: PreTrainedModel, request: _Request, watch: _Watch) -> tuple[torch.Tensor, float]:
    """The same from transformers' ``generate``."""
    inputs = {name: tensor.to(model.device) for name, tensor in request.inputs.items()}
    request.seed_generators()
    started = time.perf_counter()
    # The checkpoint's generation config may sample; only what the caller asks for counts here.
    output = model.generate(
        **inputs,
        max_new_tokens=request.max_new_tokens,
        do_sample=request.temperature > 0,
        temperature=request.temperature or None,
        top_k=0 if request.temperature else None,
        top_p=None,
        pad_token_id=request.pad,
        streamer=watch,
    )
    return output[0, inputs["input_ids"].shape[1] :], started


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool | None
) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` ``[1, T]``. Errors: as :func:`generate`."""
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise HalfbyteError("the prompt is not UTF-8; accepted: text")
    has_template = tokenizer.chat_template is not None
    if chat and not has_template:
        raise HalfbyteError("the tokenizer has no chat template; accepted: a raw prompt")
    if has_template if chat is None else chat:
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if inputs["input_ids"].numel() == 0:
        raise HalfbyteError("the prompt has no tokens")
    return {name: inputs[name].long() for name in ("input_ids", "attention_mask")}


def _pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Any token will do for one prompt; that it is named keeps transformers from warning."""
    configured = model.generation_config.pad_token_id
    return configured if configured is not None else tokenizer.eos_token_id


def _stop_tokens(model: PreTrainedModel) -> list[int]:
    stop = model.generation_config.eos_token_id
    return [] if stop is None else [stop] if isinstance(stop, int) else list(stop)


@lru_cache
def _note_once(message: str) -> None:
    logger.warning(message)


class _Watch(TextStreamer):
    """Notes when each new token comes, and passes its text on."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self._on_text = on_text
        self._prompt_came = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_came:
            self.times.append(time.perf_counter())
        self._prompt_came = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._on_text and text:
            self._on_text(text)
