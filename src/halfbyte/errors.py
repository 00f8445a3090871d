"""What halfbyte says when it cannot go on: one line with what is wrong, where, and what would be accepted."""

from __future__ import annotations


class HalfbyteError(Exception):
    """Bad input: the command line prints the message as one line and exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class NonFiniteError(HalfbyteError):
    """A tensor that must be finite holds NaN or Inf."""
