"""A model made ready to answer prompts of one shape, kept for the next prompt of that shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from halfbyte.engines.transformers.cuda_graphs import captured
from halfbyte.engines.transformers.decoding import Decoder, Frame
from halfbyte.engines.transformers.fusion import fuse
from halfbyte.errors import HalfbyteError
from halfbyte.layers.linear import QuantLinear

# Prompts and answers of similar lengths share buffers, and the graph captured on them.
_LENGTH_STEP = 128


class Session:
    """Buffers for one frame and, on a CUDA device, a step that is fused and captured. Does not keep the model alive."""

    @torch.inference_mode(False)
    def __init__(self, model: PreTrainedModel, frame: Frame) -> None:
        on_gpu = model.device.type == "cuda"
        if on_gpu:
            fuse(model)
        self.frame = frame
        self.decoder = Decoder(model, frame)
        self._step: Callable[[], None] = self.decoder.step
        if on_gpu:
            self._step = captured(self.decoder.step, model.device)
        self._attention = _attention(model)
        self._placement = _placement(model)

    def still_fits(self, model: PreTrainedModel) -> bool:
        """Whether all weights lie where they lay when the step was captured, and attention runs as it did."""
        return _attention(model) == self._attention and _placement(model) == self._placement

    def step(self) -> None:
        """:meth:`Decoder.step`, from the graph if there is one."""
        self._step()

    def answer(
        self,
        prompt: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int,
        stop: Sequence[int] = (),
        pad: int = 0,
        temperature: float = 0.0,
        penalty: float = 1.0,
    ) -> Iterator[torch.Tensor]:
        """New tokens, int64 ``[B]`` on the CPU, one set after the other, as soon as each is known.

        prompt, mask: ``[B, T]``, padded on the left. stop: ids of which one ends a sequence; afterwards ``pad``
        stands in its place, until all have ended.
        Errors: a prompt or mask that is not of the frame's shape; no room for prompt and answer.
        """
        self._check(prompt, mask, max_new_tokens)
        return self._answer(prompt, mask, max_new_tokens, stop, pad, temperature, penalty)

    def _check(self, prompt: torch.Tensor, mask: torch.Tensor | None, max_new_tokens: int) -> None:
        batch, length = self.frame.batch, self.frame.length
        if prompt.dim() != 2 or prompt.shape[0] != batch or prompt.shape[1] == 0:
            raise HalfbyteError(
                f"the prompt has shape {list(prompt.shape)}; accepted: [{batch}, T], of at least 1 token"
            )
        if mask is not None and mask.shape != prompt.shape:
            raise HalfbyteError(
                f"the mask has shape {list(mask.shape)}; accepted: the prompt's, {list(prompt.shape)}"
            )
        if prompt.shape[1] + max(max_new_tokens, 1) > length:
            raise HalfbyteError(
                f"a prompt of {prompt.shape[1]} tokens with {max_new_tokens} new ones does not fit; "
                f"accepted: {length} together, at least 1 of them new"
            )

    def _answer(
        self,
        prompt: torch.Tensor,
        mask: torch.Tensor | None,
        max_new_tokens: int,
        stop: Sequence[int],
        pad: int,
        temperature: float,
        penalty: float,
    ) -> Iterator[torch.Tensor]:
        self.decoder.read(prompt, mask, temperature=temperature, penalty=penalty)
        coming = _Copy(self.decoder.tokens)
        ended = torch.zeros(self.frame.batch, dtype=torch.bool)
        stops = torch.tensor(stop, dtype=torch.int64)
        for remaining in range(max_new_tokens - 1, -1, -1):
            tokens = coming
            if remaining:
                # The device gets its next step before anyone looks at the last one: it never stands idle, and a
                # step too many at the end harms nobody.
                self.step()
                coming = _Copy(self.decoder.tokens)
            chosen = tokens.wait().masked_fill(ended, pad)
            # Not in place: the caller may have left inference mode, or entered it, since the last token.
            ended = ended | torch.isin(chosen, stops)
            yield chosen
            if ended.all():
                return


def session(
    model: PreTrainedModel, batch: int, length: int, *, sampled: bool = False, penalized: bool = False
) -> Session:
    """A session with room for ``length`` tokens, prompt and answer; the model's last one if that is still of use."""
    frame = Frame(batch, -(-length // _LENGTH_STEP) * _LENGTH_STEP, sampled, penalized)
    kept = _sessions.get(model)
    if kept is None or kept.frame != frame or not kept.still_fits(model):
        # Its buffers go before the new ones come.
        _sessions.pop(model, None)
        del kept
        kept = _sessions[model] = Session(model, frame)
    return kept


_sessions: WeakKeyDictionary[PreTrainedModel, Session] = WeakKeyDictionary()


class _Copy:
    """Tokens on their way from the device, as they are now."""

    def __init__(self, tokens: torch.Tensor) -> None:
        if tokens.device.type == "cpu":
            self._tokens, self._arrived = tokens.clone(), None
            return
        with torch.cuda.device(tokens.device):
            self._tokens = tokens.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tokens


def _attention(model: PreTrainedModel) -> str | None:
    return model.config.get_text_config()._attn_implementation


def _placement(model: PreTrainedModel) -> tuple[int, ...]:
    packed = chain.from_iterable(
        module.packed_tensors() for module in model.modules() if isinstance(module, QuantLinear)
    )
    return tuple(tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers(), packed))
