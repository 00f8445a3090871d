"""How a text is cut into windows, and which tokens of a window count."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.errors import HalfbyteError


@dataclass(frozen=True)
class Window:
    """Tokens ``start`` to ``stop`` are shown to the model; those from ``first_scored`` on count."""

    start: int
    stop: int
    first_scored: int

    @property
    def scored(self) -> int:
        return self.stop - self.first_scored


def plan_windows(
    tokens: int, context: int, stride: int | None = None, *, bos: bool = False, limit: int | None = None
) -> list[Window]:
    """Windows of ``context`` tokens, each ``stride`` after the one before; what fills none is left out.

    No token counts twice: where windows overlap, the later one counts only what it adds, so that every
    token but the first window's has at least ``context - stride`` tokens before it. Without overlap (the
    default) the first token of each window has nothing before it and does not count, unless ``bos`` puts a
    start token, which takes one place of the context, in front of it.

    Errors: ``context`` below 2, ``stride`` outside 1 to what a window holds, a text shorter than one window.
    """
    if context < 2:
        raise HalfbyteError(f"context {context} is too short, expected at least 2 tokens")
    lead = int(bos)
    span = context - lead
    stride = span if stride is None else stride
    if not 1 <= stride <= span:
        raise HalfbyteError(f"stride {stride} is outside 1 to {span} (the text tokens of a window)")
    if limit is not None and limit < 1:
        raise HalfbyteError(f"{limit} windows are too few, expected at least 1")
    if tokens < span:
        raise HalfbyteError(f"the text has {tokens} tokens, one window needs {span}")
    windows: list[Window] = []
    seen = 0
    for start in range(0, tokens - span + 1, stride):
        if len(windows) == limit:
            break
        windows.append(Window(start, start + span, max(seen, start + 1 - lead)))
        seen = start + span
    return windows
