"""What a model passes to its decoder blocks besides hidden states, found by running the model around them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from halfbyte.errors import HalfbyteError

# Masks grow with the square of the length: past this, those seen long ago are found anew when they return.
_CACHED_BYTES = 256 << 20
_HIDDEN = "hidden_states"


@dataclass(frozen=True)
class BlockArguments:
    """Arguments of one call of a block; its hidden states are among neither."""

    after_hidden: tuple[Any, ...]
    named: dict[str, Any]

    def call(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """What ``block`` makes of ``hidden``, ``[n, T, hidden]``."""
        result = block(hidden, *self.after_hidden, **self.named)
        return result[0] if isinstance(result, tuple) else result


@dataclass(frozen=True)
class Surroundings:
    """What happens to sequences outside the blocks.

    entering: hidden states ``[n, T, hidden]`` that the first block gets. arguments: one per block.
    """

    entering: torch.Tensor
    arguments: Sequence[BlockArguments]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, each once."""
        leaves = tree_leaves([(entry.after_hidden, entry.named) for entry in self.arguments])
        return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


class ModelAround:
    """The model's own code with its blocks left out. Sequences are not padded, so that masks follow from lengths.

    Arguments are kept by number and length of sequences. A family whose arguments depend on the tokens as well (found
    by trying other tokens) has them made every time.
    """

    def __init__(self, model: PreTrainedModel, blocks: Sequence[nn.Module]) -> None:
        self._model = model
        self._blocks = blocks
        self._in_tuple = False
        self._follows_tokens: bool | None = None
        self._by_shape: OrderedDict[torch.Size, Sequence[BlockArguments]] = OrderedDict()
        self._bytes: dict[torch.Size, int] = {}

    def known(self, ids: torch.Tensor) -> bool:
        """Whether the arguments for ``ids`` are at hand, so that nothing of the model has to run."""
        return ids.shape in self._by_shape

    def enter(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[n, T, hidden]`` that go into the first block for tokens ``[n, T]``."""
        return self._run(ids).entering

    def arguments(self, ids: torch.Tensor) -> Sequence[BlockArguments]:
        """The arguments of each block for tokens ``[n, T]``."""
        if ids.shape not in self._by_shape:
            return self._run(ids).arguments
        self._by_shape.move_to_end(ids.shape)
        return self._by_shape[ids.shape]

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, T, vocabulary]`` from what the last block returned."""
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)

        def last(*_: Any, **__: Any) -> Any:
            return (hidden,) if self._in_tuple else hidden

        with _standing_in(self._blocks, [last] * len(self._blocks)):
            logits = self._model(input_ids=ids, use_cache=False).logits
        if logits.dim() == 2:
            self._in_tuple = True
            return self.leave(hidden)
        return logits

    def _run(self, ids: torch.Tensor) -> Surroundings:
        found = self._record(ids)
        if self._follows_tokens is None:
            self._follows_tokens = _differ(found, self._record(_other_tokens(ids)))
        if not self._follows_tokens:
            self._keep(ids.shape, found)
        return found

    def _keep(self, shape: torch.Size, found: Surroundings) -> None:
        self._by_shape[shape] = found.arguments
        self._by_shape.move_to_end(shape)
        self._bytes[shape] = sum(tensor.nbytes for tensor in found.tensors)
        while len(self._by_shape) > 1 and sum(self._bytes.values()) > _CACHED_BYTES:
            oldest, _ = self._by_shape.popitem(last=False)
            del self._bytes[oldest]

    def _record(self, ids: torch.Tensor) -> Surroundings:
        recorder = _Recorder(self._model, len(self._blocks), self._in_tuple)
        try:
            with _standing_in(self._blocks, recorder.forwards):
                self._model(input_ids=ids, use_cache=False)
        except _AllRecordedError:
            return Surroundings(recorder.hidden[0], recorder.arguments)
        except _TakenApartError:
            self._in_tuple = True
            return self._record(ids)
        raise HalfbyteError(f"{type(self._model).__name__}: its forward pass does not call all of its blocks")


class _AllRecordedError(Exception):
    """Ends a forward pass of which nothing more is needed."""


class _TakenApartError(Exception):
    """The model takes the first item of what a block returns."""


class _Recorder:
    def __init__(self, model: nn.Module, blocks: int, in_tuple: bool) -> None:
        self._family = type(model).__name__
        self._in_tuple = in_tuple
        self._blocks = blocks
        self.hidden: list[torch.Tensor] = []
        self.arguments: list[BlockArguments] = []
        self.forwards = [self._forward(index) for index in range(blocks)]

    def _forward(self, index: int) -> Callable[..., Any]:
        def record(*arguments: Any, **named: Any) -> Any:
            hidden = arguments[0] if arguments else named.pop(_HIDDEN)
            self._require_chain(index, hidden)
            self.hidden.append(hidden)
            self.arguments.append(BlockArguments(arguments[1:], named))
            if index == self._blocks - 1:
                raise _AllRecordedError
            return (hidden,) if self._in_tuple else hidden

        return record

    def _require_chain(self, index: int, hidden: torch.Tensor) -> None:
        if len(self.hidden) == index and (not index or hidden is self.hidden[0]):
            return
        if index == 1 and not self._in_tuple and hidden.shape == self.hidden[0].shape[1:]:
            raise _TakenApartError
        raise HalfbyteError(
            f"{self._family}: block {index} does not get what the block before it returned; "
            "accepted: models whose blocks follow each other directly"
        )


@contextmanager
def _standing_in(blocks: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """``forwards`` run in place of the blocks, whose attributes stay there for the model to read."""
    for block, forward in zip(blocks, forwards, strict=True):
        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _other_tokens(ids: torch.Tensor) -> torch.Tensor:
    return torch.where(ids == 0, 1, ids - 1)


def _differ(first: Surroundings, second: Surroundings) -> bool:
    if len(first.tensors) != len(second.tensors):
        return True
    pairs = zip(first.tensors, second.tensors, strict=True)
    return any(not torch.equal(one, other) for one, other in pairs)
