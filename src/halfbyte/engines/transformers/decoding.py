"""Decoding on buffers that stay where they are: the prompt is read once, then every step is the same work."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from weakref import ref

import torch
from transformers import PreTrainedModel

from halfbyte.engines.transformers.fixed_cache import FixedCache
from halfbyte.engines.transformers.token_choice import TokenChoice
from halfbyte.engines.transformers.visibility import Visibility
from halfbyte.errors import HalfbyteError

# Prompt tokens that a model reads at once: enough for the matrix products, few enough for the memory between them.
_PROMPT_TOKENS = 1 << 15


@dataclass(frozen=True)
class Frame:
    """What a decoder's buffers are made for. batch: prompts at once. length: tokens of prompt and answer.

    sampled, penalized: as :class:`TokenChoice` has them. Errors: no prompts; no room.
    """

    batch: int
    length: int
    sampled: bool = False
    penalized: bool = False

    def __post_init__(self) -> None:
        if min(self.batch, self.length) < 1:
            raise HalfbyteError(
                f"cannot decode {self.batch} prompts in {self.length} tokens; accepted: at least 1 of each"
            )


class Decoder:
    """A model with the buffers of one ``frame``.

    :meth:`read` takes a prompt and chooses the first token; each :meth:`step` then takes the token chosen last and
    chooses the next one. A step reads and writes these buffers only and never waits for the device, so it can be
    captured as a CUDA graph; ``tokens`` (int64 ``[B]``) is where the latest choice lies. The model must outlive it.
    The buffers outlive the inference mode of any caller.
    """

    @torch.inference_mode(False)
    def __init__(self, model: PreTrainedModel, frame: Frame) -> None:
        config = model.config.get_text_config()
        device = model.device
        self.frame = frame
        self.tokens = torch.zeros(frame.batch, dtype=torch.int64, device=device)
        self._model = ref(model)
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(frame.batch, 1, dtype=torch.int64, device=device)
        self._visibility = Visibility(config, frame.batch, frame.length, self._slot)
        self._cache = FixedCache(config.num_hidden_layers, frame.batch, frame.length, self._slot)
        self._choice = TokenChoice(
            frame.batch, config.vocab_size, device, sampled=frame.sampled, penalized=frame.penalized
        )
        self._additive = model.dtype if config._attn_implementation == "eager" else None
        self._cache_argument = cache_argument(model)

    @torch.inference_mode(False)
    @torch.no_grad()
    def read(
        self,
        prompt: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        temperature: float = 0.0,
        penalty: float = 1.0,
    ) -> None:
        """prompt: token ids ``[B, T]``, T below the frame's length. mask: ``[B, T]``, 0 where padded, on the left."""
        tokens = prompt.shape[1]
        present = torch.ones_like(prompt, dtype=torch.bool) if mask is None else mask.bool()
        positions = (present.long().cumsum(-1) - 1).clamp_(min=0)
        self._choice.begin(prompt, temperature, penalty)
        logits = self._read_in_parts(prompt, positions, None if present.all() else present)
        self._slot.fill_(tokens)
        self._positions.copy_(positions[:, -1:] + 1)
        self._visibility.begin(present)
        self.tokens.copy_(self._choice(logits))

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> None:
        """One more token for every prompt."""
        masks = self._visibility.masks(self._additive)
        logits = self._forward(self.tokens.unsqueeze(-1), self._positions, masks)
        self.tokens.copy_(self._choice(logits))
        self._slot.add_(1)
        self._positions.add_(1)
        self._visibility.advance()

    def _read_in_parts(
        self, prompt: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        sequences = max(1, _PROMPT_TOKENS // prompt.shape[1])
        logits = []
        for start in range(0, self.frame.batch, sequences):
            part = slice(start, start + sequences)
            with self._cache.prompt(part):
                logits.append(
                    self._forward(prompt[part], positions[part], None if mask is None else mask[part])
                )
        return torch.cat(logits)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, masks: object) -> torch.Tensor:
        """Logits ``[B, vocabulary]`` of the last of ``tokens`` ``[B, T]``."""
        model = self._model()
        assert model is not None
        output = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        return output.logits[:, -1]


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: it was ``past_key_values`` before transformers 5.2x."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
