"""Which tokens of a chat count, from which characters of its rendered text do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from halfbyte.calibration.messages import Message
from halfbyte.calibration.placement import Placed

COUNTS = ""
TEMPLATE = "template"
WEIGHT = "weight"
SPAN = "span"
MASKED_ROLES = ("system", "developer", "tool")
"""Roles whose messages do not count unless others are named: they repeat from chat to chat."""


def character_reasons(
    length: int, messages: Sequence[Message], places: Sequence[Placed | None], masked_roles: Collection[str]
) -> list[str]:
    """For each of ``length`` characters why it does not count, or ``COUNTS``.

    places: where each message's content lies, None where the template left no trace of it.
    """
    reasons = [TEMPLATE] * length
    for message, place in zip(messages, places, strict=True):
        if place is None:
            continue
        whole = f"role:{message.role}" if message.role in masked_roles else COUNTS
        whole = whole or (COUNTS if message.weight else WEIGHT)
        reasons[place.start : place.stop] = [whole] * (place.stop - place.start)
        if whole == COUNTS:
            for start, stop in message.spans:
                covered = range(*place.within(start, stop))
                reasons[covered.start : covered.stop] = [SPAN] * len(covered)
    return reasons


def token_reasons(offsets: Sequence[tuple[int, int]], characters: Sequence[str]) -> list[str]:
    """For each token why it does not count, or ``COUNTS``: it does if all of its characters do.

    offsets: first character and the one after the last; a token without characters goes with the one that follows.
    """
    return [
        next((reason for reason in characters[start : max(stop, start + 1)] if reason), COUNTS)
        if start < len(characters)
        else TEMPLATE
        for start, stop in offsets
    ]
