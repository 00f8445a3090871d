"""Dealing: tokens of documents, chats and rows of ids become samples, each as long as its turn says."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random

import torch

from halfbyte.calibration.masks import COUNTS
from halfbyte.calibration.samples import Sample


class Dealer:
    """Makes up to ``wanted`` samples; their lengths are those of ``lengths``, in turn.

    A document as long as its turn gives one window from a place that ``random`` chooses, so that few long documents do
    not take the place of many; the rest waits until there is nothing else. Shorter ones are packed, ``separator``
    between them. ``start`` opens every sample made of documents, within its length.
    """

    def __init__(
        self, wanted: int, lengths: Sequence[int], start: list[int], separator: list[int], random: Random
    ) -> None:
        self.samples: list[Sample] = []
        self.masked: Counter[str] = Counter()
        self.split = 0
        self.truncated = 0
        self._wanted = wanted
        self._lengths = lengths
        self._turn = 0
        self._start = start
        self._separator = separator
        self._random = random
        self._pack: list[int] = []
        self._pack_length = 0
        self._waiting: deque[tuple[Callable[[list[int]], bool], list[int]]] = deque()

    @property
    def full(self) -> bool:
        return len(self.samples) >= self._wanted

    def add_document(self, ids: list[int]) -> None:
        self.split += self._deal_document(ids)

    def add_ids(self, ids: list[int]) -> None:
        """Token ids of a user: nothing is put before or between them, longer ones are cut into windows."""
        self.split += self._deal_ids(ids)

    def add_chat(self, ids: list[int], reasons: list[str]) -> bool:
        """One sample; a longer chat is cut, back to the last token that counts. False if none does then.

        Masked tokens at the end would be computed for nothing: no token that counts can see them.
        """
        length = self._length()
        truncated = len(ids) > length
        if truncated:
            ids, reasons = ids[:length], reasons[:length]
            while reasons and reasons[-1] != COUNTS:
                reasons.pop()
            ids = ids[: len(reasons)]
        if COUNTS not in reasons:
            return False
        self._turn += 1
        self.truncated += truncated
        self._emit(ids, reasons)
        return True

    def finish(self) -> None:
        """Makes of what was left over the samples that are still wanted, the last of them perhaps shorter."""
        while self._waiting and not self.full:
            deal, ids = self._waiting.popleft()
            deal(ids)
        if self._pack and not self.full:
            self._emit_pack()

    def _deal_document(self, ids: list[int]) -> bool:
        """Whether the document was cut."""
        length = self._length()
        room = length - len(self._opening(length))
        if len(ids) >= room:
            self._turn += 1
            return self._deal_window(ids, room, self._opening(length), self._deal_document)
        if not self._pack:
            self._pack = list(self._opening(length))
            self._pack_length = length
            self._turn += 1
            self._pack += ids
            return False
        return self._append([*self._separator, *ids])

    def _append(self, ids: list[int]) -> bool:
        room = self._pack_length - len(self._pack)
        self._pack += ids[:room]
        if len(self._pack) == self._pack_length:
            self._emit_pack()
        return self._wait(ids[room:], self._deal_document)

    def _deal_ids(self, ids: list[int]) -> bool:
        length = self._length()
        self._turn += 1
        return self._deal_window(ids, min(length, len(ids)), [], self._deal_ids)

    def _deal_window(
        self, ids: list[int], room: int, opening: list[int], deal: Callable[[list[int]], bool]
    ) -> bool:
        first = room * self._random.randrange(len(ids) // room)
        self._emit(opening + ids[first : first + room])
        before = self._wait(ids[:first], deal)
        return self._wait(ids[first + room :], deal) or before

    def _wait(self, ids: list[int], deal: Callable[[list[int]], bool]) -> bool:
        if ids:
            self._waiting.append((deal, ids))
        return bool(ids)

    def _length(self) -> int:
        return self._lengths[self._turn % len(self._lengths)]

    def _opening(self, length: int) -> list[int]:
        return self._start if length > len(self._start) else []

    def _emit_pack(self) -> None:
        self._emit(self._pack)
        self._pack = []

    def _emit(self, ids: list[int], reasons: list[str] | None = None) -> None:
        counts = [True] * len(ids) if reasons is None else [reason == COUNTS for reason in reasons]
        self.samples.append(Sample(torch.tensor(ids, dtype=torch.int64), torch.tensor(counts)))
        self.masked.update(reason for reason in reasons or () if reason != COUNTS)
