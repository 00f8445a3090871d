"""What the arguments of ``halfbyte bench`` say: lists with commas, sizes, shapes."""

from __future__ import annotations

from halfbyte.errors import HalfbyteError

# More than any model has. What exceeds it is a slip of the finger, and would end in a failed allocation.
MOST = 2**20
_MOST_WEIGHTS = 2**32


def names(text: str, option: str) -> list[str]:
    """Errors: an empty name."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise HalfbyteError(f"{option} {text!r}; accepted: names with commas between them")
    return found


def counts(text: str, option: str) -> list[int]:
    """Errors: what is no number from 1 to :data:`MOST`."""
    found = [_count(part) for part in text.split(",")]
    if None in found:
        raise HalfbyteError(
            f"{option} {_short(text)}; accepted: numbers up to {MOST} with commas between them, such as 1,16,128"
        )
    return [count for count in found if count is not None]


def shape(text: str, option: str) -> tuple[int, int]:
    """out_features, in_features. Errors: what is no ``NxK``; more weights than any layer has."""
    sides = [_count(part) for part in text.lower().split("x")]
    if len(sides) != 2 or sides[0] is None or sides[1] is None or sides[0] * sides[1] > _MOST_WEIGHTS:
        raise HalfbyteError(
            f"{option} {_short(text)}; accepted: out_features x in_features, such as 4096x4096, "
            f"of at most {MOST} each and {_MOST_WEIGHTS} weights"
        )
    return sides[0], sides[1]


def shapes(text: str, option: str) -> list[tuple[int, int]]:
    """As :func:`shape`, with commas between them."""
    return [shape(part, option) for part in text.split(",")]


def _count(text: str) -> int | None:
    digits = text.strip().lstrip("0")
    if not digits.isdecimal() or len(digits) > len(str(MOST)) or not 0 < int(digits) <= MOST:
        return None
    return int(digits)


def _short(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}...")
