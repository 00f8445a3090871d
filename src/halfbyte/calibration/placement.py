"""Where the contents of messages lie in the text that a chat template made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Render = Callable[[Sequence[str]], str]
"""From the contents of all messages of a chat to its text."""


@dataclass(frozen=True)
class Placed:
    """Characters ``start`` to ``stop`` of the text are a content from its character ``skipped`` on."""

    start: int
    stop: int
    skipped: int

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Characters of the text for a range of the content; empty if the template left that away."""
        first = min(max(start - self.skipped, 0) + self.start, self.stop)
        return first, max(first, min(stop - self.skipped + self.start, self.stop))


def place(contents: Sequence[str], text: str, render: Render) -> list[Placed | None]:
    """Where each of ``contents`` lies in ``text``, which is ``render(contents)``; None where it does not.

    The same chat with a mark for each content shows what the template itself writes, so that a content which also
    occurs there ("user") is not mistaken for it. Where contents change what a template writes, they are looked for
    one after the other instead. White space around a content may be missing in the text.
    """
    marks = [f"\ue000{i}\ue001" if content.strip() else content for i, content in enumerate(contents)]
    return _by_marks(contents, text, marks, render(marks)) or _in_order(contents, text)


def _by_marks(
    contents: Sequence[str], text: str, marks: Sequence[str], marked: str
) -> list[Placed | None] | None:
    """None if the text is not the marked one with contents, or trimmed contents, instead of marks."""
    found = [i for i, content in enumerate(contents) if content.strip() and marks[i] in marked]
    found.sort(key=lambda i: marked.index(marks[i]))
    literals = _split(marked, [marks[i] for i in found])
    places: list[Placed | None] = [None] * len(contents)
    position = len(literals[0])
    if not text.startswith(literals[0]):
        return None
    for i, literal in zip(found, literals[1:], strict=True):
        for content, skipped in _forms(contents[i]):
            if text.startswith(content + literal, position):
                places[i] = Placed(position, position + len(content), skipped)
                position += len(content) + len(literal)
                break
        else:
            return None
    return places if position == len(text) else None


def _in_order(contents: Sequence[str], text: str) -> list[Placed | None]:
    places: list[Placed | None] = []
    position = 0
    for original in contents:
        found = None
        for content, skipped in _forms(original) if original.strip() else ():
            start = text.find(content, position)
            if start >= 0:
                position = start + len(content)
                found = Placed(start, position, skipped)
                break
        places.append(found)
    return places


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """What lies before, between and after ``marks``, which occur in this order."""
    parts = []
    for mark in marks:
        before, _, text = text.partition(mark)
        parts.append(before)
    return [*parts, text]


def _forms(content: str) -> list[tuple[str, int]]:
    """How a template may write a content, and how many of its first characters it then leaves away."""
    leading = len(content) - len(content.lstrip())
    return [(content, 0), (content.strip(), leading), (content.rstrip(), 0), (content.lstrip(), leading)]
