"""Whether a pattern means a module. The one matcher for recipes, stored configs and ignore lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import lru_cache

from halfbyte.errors import HalfbyteError
from halfbyte.models.names import unwrapped

REGEX_PREFIX = "re:"
_WILDCARDS = frozenset("*?[")


def specificity(pattern: str) -> int:
    """Which of several matching patterns decides: the lowest, 0 exact, 1 ``re:``, 2 wildcards."""
    if pattern.startswith(REGEX_PREFIX):
        return 1
    return 2 if _WILDCARDS.intersection(pattern) else 0


def matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` means the module ``name`` (full name, without ``.weight``).

    ``re:<regex>`` is tried from the start of the name and may end before it does (``re.match``, what
    compressed-tensors and vLLM do: write ``$`` to pin the end). A pattern with ``*``, ``?`` or ``[`` is
    a shell wildcard over the whole name; ``*`` crosses dots; case counts. Anything else is the exact name.
    Some families wrap a projection (``q_proj.linear``): name and pattern may each have that suffix or not.

    Errors: a regular expression that does not compile.
    """
    if specificity(pattern) == 0:
        return unwrapped(pattern) == unwrapped(name)
    compiled = _compiled(pattern)
    return compiled.match(name) is not None or compiled.match(unwrapped(name)) is not None


class Patterns:
    """Several patterns, of which one decides: exact before ``re:`` before wildcards, then the earlier one.

    Errors: a regular expression that does not compile.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        ordered = sorted(dict.fromkeys(patterns), key=specificity)
        self._exact = {unwrapped(p): p for p in reversed(ordered) if specificity(p) == 0}
        self._others = [p for p in ordered if specificity(p) != 0]
        for pattern in self._others:
            _compiled(pattern)

    def matching(self, name: str) -> list[str]:
        """All patterns that mean ``name``; the first decides."""
        exact = self._exact.get(unwrapped(name))
        others = [pattern for pattern in self._others if matches(name, pattern)]
        return others if exact is None else [exact, *others]


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith(REGEX_PREFIX):
        return re.compile(translate(unwrapped(pattern)))
    try:
        return re.compile(pattern.removeprefix(REGEX_PREFIX))
    except re.error as error:
        raise HalfbyteError(f"pattern {pattern!r} is no regular expression: {error}") from error
