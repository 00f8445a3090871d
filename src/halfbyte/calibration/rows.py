"""A row of a data file, and the refusals that name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from halfbyte.errors import HalfbyteError


@dataclass(frozen=True)
class Row:
    """columns: as in the file; one that is absent and one that is null mean the same. where: file, and line or row."""

    where: str
    columns: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.columns.get(name)

    def refuse(self, why: str) -> NoReturn:
        raise HalfbyteError(f"{self.where}: {why}")

    def text(self, value: object, what: str) -> str:
        """``value``, which ``what`` names in the error if it is no text that can be encoded."""
        if not isinstance(value, str):
            self.refuse(f"{what} is {kind(value)}, expected a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self.refuse(f"{what} is no valid Unicode (a lone surrogate at character {error.start})")
        return value


def kind(value: object) -> str:
    """What JSON calls a value of this type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
